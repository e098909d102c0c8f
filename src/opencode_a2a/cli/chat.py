"""A conversation at the terminal: lines in, turns out, the agent's questions answered in between.

``cli.call`` declares the command. Nothing here knows the network; ``talk`` takes the turns.
"""

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Generator
from pathlib import Path

import click

from opencode_a2a.cli.screen import Screen, report_end
from opencode_a2a.cli.talk import CanceledError, RefusedError, Talk, exit_status
from opencode_a2a.events import Json
from opencode_a2a.messages import Part
from opencode_a2a.peers.answer import WAITING, PeerTask, state_word
from opencode_a2a.printable import command, indented, one_line

_REPLIES = {
    "o": "once",
    "y": "once",
    "a": "always",
    "r": "reject",
    "n": "reject",
    "t": "yes for this task",
    "c": "yes for this conversation",
}
_HISTORY_LINES = 1000
_REFLEX_SECONDS = 0.3
"""Time after a question in which nobody can have read it."""
_PASTE_SECONDS = 0.05
"""Time in which the next line of a paste arrives, where the terminal does not mark pastes."""


class Conversation:
    """One context at an agent, from the first line until the person leaves."""

    def __init__(self, talk: Talk, context_id: str | None) -> None:
        self.context_id = context_id
        self._talk = talk
        self._waiting: PeerTask | None = None
        """The task that waits for an answer; every line goes to it until that is settled."""

    def hold(self) -> int:
        """Go on until the person leaves: end of input, /quit, or Ctrl-C twice.

        Return the exit status: that of the last turn, 3 if a question was left open.
        """
        status = 0
        # A Ctrl-C that comes between two steps is the second one, or as good as that.
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            stopped = False
            while True:
                try:
                    status = self._turn(self._read())
                    stopped = False
                except CanceledError as error:
                    stopped, status = True, error.exit_code
                    click.echo(f"{error.message}; Ctrl-C again leaves", err=True)
                except RefusedError:
                    raise
                except click.ClickException as error:
                    status = 1
                    error.show()
                except KeyboardInterrupt:
                    if stopped:
                        break
                    stopped = True
                    waiting, self._waiting = self._waiting, None
                    canceled = ""
                    if waiting:
                        status = CanceledError.exit_code
                        canceled = f"{self._talk.cancel(waiting)}; "
                    click.echo(f"\n{canceled}Ctrl-C again leaves", err=True)
        if self._waiting is None:
            return status
        then = command("call", *self._talk.named, "--task", self._waiting.task_id or "", "…")
        click.echo(f"The agent still waits; answer with: {then}", err=True)
        return exit_status(self._waiting.status.state)

    def _turn(self, parts: list[Part]) -> int:
        task = self._waiting or PeerTask()
        task_id = task.task_id if self._waiting else None
        planned = re.match(r"/plan\s+(?=\S)", parts[0].text or "") if not task_id else None
        if planned is not None:
            parts = [Part("text", text=(parts[0].text or "")[planned.end() :]), *parts[1:]]
        try:
            self._talk.ask(
                parts,
                task,
                Screen(),
                task_id=task_id,
                context_id=self.context_id,
                plan=planned is not None,
            )
        except CanceledError:
            self._waiting = None
            raise
        except click.ClickException:
            if self._waiting:
                # The answer did not get through; the agent may no longer wait for one.
                with contextlib.suppress(click.ClickException):
                    found = self._talk.run(self._talk.peer.task(task_id or ""))
                    if found.status.state not in WAITING:
                        self._waiting = None
                        word = state_word(found.status.state)
                        text = f"The agent no longer waits for an answer; the task is {word}."
                        click.echo(text, err=True)
            raise
        finally:
            self.context_id = task.context_id or self.context_id
        self._waiting = task if task.status.state in WAITING else None
        if self._waiting:
            text = indented(task.said) or "The agent waits for an answer."
            click.echo(text, err=True)
        else:
            report_end(self._talk, task)
        return exit_status(task.status.state)

    def _read(self) -> list[Part]:
        """Return what to send: a message, or the answer to what the agent asked."""
        asked = self._waiting and self._waiting.asked
        if self._waiting:
            discard_early_input()
        if asked and len(asked.questions) > 1:
            answers: list[Json] = []
            for question in asked.questions:
                line = read_message(f"{one_line(question.header or question.question)}> ")
                given = [item.strip() for item in line.split(",")] if question.multiple else [line]
                # Numbers stand for options.
                labels = {str(n): option.label for n, option in enumerate(question.options, 1)}
                answers.append([labels.get(item, item) for item in given if item])
            return [Part("data", data={"request_id": asked.request_id, "answers": answers})]
        while True:
            text = read_message("answer> " if self._waiting else "> ")
            if text == "/new" and self._waiting:
                click.echo("Answer first, or press Ctrl-C to cancel the task.", err=True)
            elif text == "/new":
                self.context_id = None
            elif text and asked and asked.type == "permission":
                short = re.fullmatch(r"(#?\d+ +)?([a-z])", text, re.IGNORECASE)
                reply = text
                if short and short[2].lower() in _REPLIES:
                    reply = (short[1] or "") + _REPLIES[short[2].lower()]
                if self._waiting and self._waiting.several:
                    return [Part("text", text=reply)]  # the person names what is meant
                # Name the permission that was read: another may be asked by the time of the answer.
                named = re.search(r"\b(all|\d+)\b", text.partition(":")[0])
                name = "" if named else f"{asked.number or asked.request_id} "
                return [Part("text", text=name + reply)]
            elif text:
                return [Part("text", text=text)]


def read_message(prompt: str) -> str:
    """Return what a person enters: a line, or the lines of a paste; EOFError to leave.

    The prompt is for people: neither a script nor a copy of stdout gets to see it.
    """
    if not sys.stdin.isatty():
        prompt = ""
    elif not sys.stdout.isatty():
        click.echo(prompt, err=True, nl=False)
        prompt = ""
    try:
        lines = [input(prompt)]
        while _is_pending(_PASTE_SECONDS):
            lines.append(input())
        text = "\n".join(lines).strip()
        text.encode()
    except UnicodeError:
        raise click.ClickException("not sent: the input should be valid UTF-8") from None
    if text == "/quit":
        raise EOFError
    return text


def discard_early_input() -> None:
    """Drop what was typed before the question could be read: it answers something else."""
    if not sys.stdin.isatty():
        return
    try:
        import termios
    except ImportError:  # not on every platform
        return
    time.sleep(_REFLEX_SECONDS)
    if _is_pending(0):
        click.echo("What was typed before the question is dropped.", err=True)
    termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _is_pending(seconds: float) -> bool:
    """Whether a person's terminal has more input, or gets it within this time."""
    if os.name != "posix" or not sys.stdin.isatty():
        return False
    return bool(select.select([sys.stdin], [], [], seconds)[0])


@contextlib.contextmanager
def line_editing(history: Path) -> Generator[None]:
    """Give ``input`` a history that lasts and pastes of several lines, if a person types."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)
