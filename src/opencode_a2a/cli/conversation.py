"""A conversation at the terminal: lines in, turns out, the agent's prompts answered in between.

``chat`` holds one. It knows nothing of the network; ``talk`` takes the turns.
"""

import contextlib
import sys
from collections.abc import Generator

import click

from opencode_a2a.cli.screen import Screen, clean, report_end
from opencode_a2a.cli.talk import CanceledError, Talk, Turn, state_dir
from opencode_a2a.events import Json, Question
from opencode_a2a.messages import Part
from opencode_a2a.peers.answer import Account, Interrupted, PeerEvent
from opencode_a2a.peers.hints import Prompt

_REPLIES = {"o": "once", "y": "once", "a": "always", "r": "reject", "n": "reject"}
_HISTORY_LINES = 1000


class Conversation:
    """One context at an agent, from the first line until the person leaves."""

    def __init__(self, talk: Talk, context_id: str | None) -> None:
        self.context_id = context_id
        self._talk = talk
        self._waiting: Account | None = None
        """The task that waits for the next line."""
        self._prompt: Prompt | None = None

    def hold(self) -> None:
        """Go on until the person leaves: end of input, /quit, or Ctrl-C twice."""
        # A Ctrl-C that comes between two steps is the second one, or as good as that.
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            stopped = False
            while True:
                try:
                    parts = self._read()
                    if parts is None:
                        return
                    self._turn(parts)
                    stopped = False
                except CanceledError as error:
                    stopped = True
                    click.echo(f"{error.message}; Ctrl-C again leaves", err=True)
                except click.ClickException as error:
                    error.show()
                except KeyboardInterrupt:
                    if stopped:
                        return
                    stopped = True
                    click.echo("\nCtrl-C again leaves", err=True)

    def _turn(self, parts: list[Part]) -> None:
        account = self._waiting or Account()
        task_id = account.task_id if self._waiting else None
        self._waiting = self._prompt = None
        screen = Screen()

        def show(event: PeerEvent) -> None:
            if isinstance(event, Interrupted):
                self._prompt = event.prompt
            screen.show(event)

        try:
            self._talk.take(Turn(parts, account, task_id, self.context_id), show)
        finally:
            screen.close()
            self.context_id = account.context_id or self.context_id
        if account.status.state.waits:
            self._waiting = account
            click.echo(clean(account.status.text or "The agent waits for an answer."), err=True)
        else:
            report_end(self._talk.url, account)

    def _read(self) -> list[Part] | None:
        """Return what to send; None to leave."""
        if self._prompt and len(self._prompt.questions) > 1:
            answers: list[Json] = [_choices(question) for question in self._prompt.questions]
            return [Part("data", data={"answers": answers})]
        while True:
            line = input("answer> " if self._waiting else "> ").strip()
            if line == "/quit":
                return None
            if line == "/new":
                self.context_id = self._waiting = self._prompt = None
            elif line:
                permission = self._prompt is not None and self._prompt.type == "permission"
                reply = _REPLIES.get(line.lower(), line) if permission else line
                return [Part("text", text=reply)]


def _choices(question: Question) -> list[Json]:
    """Ask one of several questions; numbers stand for options."""
    line = input(f"{clean(question.header or question.question)}> ")
    given = [item.strip() for item in line.split(",")] if question.multiple else [line.strip()]
    labels = {str(number): option.label for number, option in enumerate(question.options, 1)}
    return [labels.get(item, item) for item in given if item]


@contextlib.contextmanager
def line_editing() -> Generator[None]:
    """Give ``input`` a history that lasts, if a person types."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    path = state_dir() / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
