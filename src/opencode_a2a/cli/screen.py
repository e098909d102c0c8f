"""How an answer looks on a terminal, and as JSON lines.

The answer goes to stdout as it is; reasoning, tools and signs of life go dim to stderr, and only
if somebody is looking there. Nothing that an agent sends can move the cursor, set a title or
hide text: control characters are left out, in JSON they are escaped.
"""

import dataclasses
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager

import click
import orjson

from opencode_a2a.peers.answer import (
    Account,
    AnswerGrew,
    AnswerReplaced,
    FileGiven,
    Finished,
    Interrupted,
    PeerEvent,
    ReasoningGrew,
    StatusChanged,
    TaskOpened,
    ToolChanged,
)
from opencode_a2a.peers.client import Tell
from opencode_a2a.peers.wire import State

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but tab and newline, C1, and what turns the direction of writing around."""
_NAMES = {
    TaskOpened: "task",
    AnswerGrew: "answer",
    AnswerReplaced: "answer_replaced",
    ReasoningGrew: "reasoning",
    ToolChanged: "tool",
    FileGiven: "file",
    StatusChanged: "status",
    Interrupted: "interrupted",
    Finished: "finished",
}


def clean(text: str) -> str:
    """Leave out what would do something to a terminal instead of being seen."""
    return _HIDDEN.sub("", text)


def one_line(text: str, width: int = 72) -> str:
    flat = " ".join(clean(text).split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


class Screen:
    """Prints a turn for a person, and its bare answer for a program."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._shared = self._watched and sys.stdout.isatty()
        self._artifact: str | None = None
        self._answer_open = False
        self._aside_open = False

    def show(self, event: PeerEvent) -> None:
        match event:
            case AnswerGrew():
                self._answer(event.artifact_id, event.text)
            case AnswerReplaced():
                self._artifact = None  # on a new line: what was printed cannot be taken back
                self._answer(event.artifact_id, event.text)
            case ReasoningGrew():
                self._aside(event.text, closed=False)
            case ToolChanged() if event.call.status != "pending":
                call = event.call
                self._aside(one_line(f"{call.tool} {call.status}  {call.title or ''}"))
            case FileGiven():
                named = event.name or event.artifact_id
                self._aside(one_line(f"file {named} {event.part.media_type or ''}"))
            case StatusChanged() if event.text:
                self._aside(event.text)
            case _:
                pass

    def close(self) -> None:
        """End the line that the answer or an aside stands on."""
        self._close_aside()
        if self._answer_open:
            click.echo()
            self._answer_open = False

    def _answer(self, artifact_id: str, text: str) -> None:
        self._close_aside()
        if self._artifact != artifact_id and self._answer_open:
            click.echo()
        self._artifact = artifact_id
        text = clean(text)
        click.echo(text, nl=False)
        sys.stdout.flush()
        self._answer_open = not text.endswith("\n") if text else self._answer_open

    def _aside(self, text: str, *, closed: bool = True) -> None:
        if not self._watched:
            return
        if closed:
            self._close_aside()
        if self._answer_open and self._shared and not self._aside_open:
            click.echo(err=True)  # to stderr, so that a copy of stdout stays as it came
        click.secho(clean(text), dim=True, err=True, nl=closed)
        self._aside_open = not closed and not text.endswith("\n")

    def _close_aside(self) -> None:
        if self._aside_open:
            click.echo(err=True)
            self._aside_open = False


def json_line(event: PeerEvent, account: Account) -> None:
    """Print an event as one JSON object; the last one has the whole answer."""
    told = {"event": _NAMES[type(event)], **dataclasses.asdict(event)}
    if isinstance(event, Interrupted | Finished):
        told |= {
            "task_id": account.task_id,
            "context_id": account.context_id,
            "answer": account.answer,
        }
    print_json(told)


def print_json(value: object) -> None:
    text = orjson.dumps(value).decode()
    click.echo(_HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


@contextmanager
def printed(url: str, account: Account, as_json: bool) -> Generator[Tell]:
    """Print what is shown in here, for a person or for a program, and how it ended."""
    if as_json:
        yield lambda event: json_line(event, account)
        return
    screen = Screen()
    try:
        yield screen.show
    finally:
        screen.close()
    report_end(url, account)


def report_end(url: str, account: Account) -> None:
    """Say on stderr what a person has to know about a turn that did not complete."""
    status = account.status
    text = clean(status.text or "").strip()
    if status.state.waits:
        click.echo(text or "The agent waits for an answer.", err=True)
        asks = status.state is State.INPUT_REQUIRED
        then = f'opencode-a2a call {url} --task {account.task_id} "…"'
        click.echo(f"{'Answer' if asks else 'Sign in, then go on'} with: {then}", err=True)
    elif status.state is not State.COMPLETED:
        click.echo(f"{status.state}: {text}" if text else f"{status.state}", err=True)
