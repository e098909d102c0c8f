"""Answers and tasks in a pipe, at a terminal, and as lines of JSON.

The answer goes to stdout unchanged; reasoning, tools and progress go to stderr, dim, and only if
that is a terminal. If both are terminals, ``live`` shows the answer instead. The table of tasks is
at the end. Everything that an agent sends is cleaned before it is printed, see ``printable``; in
JSON it is escaped. Nothing here uses the network.
"""

import asyncio
import os
import select
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import click
import orjson

from opencode_a2a.events import Json, JsonObject, Usage
from opencode_a2a.jsonguard import as_object, text_in
from opencode_a2a.log.state import TERMINAL, State
from opencode_a2a.peers.received import (
    CUT_SHORT,
    SETTLED,
    WAITING,
    AnswerGrew,
    AnswerReplaced,
    FileGiven,
    PeerEvent,
    PeerTask,
    ReceivedTask,
    TaskOpened,
    TaskStatusChanged,
    ThoughtGrew,
    ToolReported,
    progress_text,
    read_usage,
    state_word,
)
from opencode_a2a.printable import (
    SHORT_ID,
    clean,
    command,
    escaped,
    indented,
    money,
    one_line,
    span,
    spent,
)

if TYPE_CHECKING:
    from opencode_a2a.cli.live import LiveScreen
    from opencode_a2a.cli.talk import Talk

PATIENCE = 2.0
"""Seconds of silence that need no explanation."""


def print_json(value: object) -> None:
    click.echo(escaped(orjson.dumps(value).decode()))


def print_task(task: ReceivedTask) -> None:
    status = asdict(task.status) | {"state": state_word(task.status.state)}
    print_json(asdict(task) | {"status": status})


class JsonLines:
    """Prints every event as one JSON object; the last one has the whole answer."""

    def __init__(self, task: PeerTask) -> None:
        self._task = task

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def show(self, event: PeerEvent) -> None:
        match event:
            case TaskOpened():
                line: JsonObject = {"event": "task", **asdict(event)}
            case AnswerGrew():
                line = {"event": "answer", **asdict(event)}
            case AnswerReplaced():
                line = {"event": "answer_replaced", **asdict(event)}
            case ThoughtGrew():
                line = {"event": "reasoning", **asdict(event)}
            case ToolReported():
                line = {"event": "tool", "call": asdict(event)}
            case FileGiven():
                line = {"event": "file", **asdict(event)}
            case TaskStatusChanged():
                line = self._status(event)
        print_json(line)

    def _status(self, event: TaskStatusChanged) -> JsonObject:
        line: JsonObject = {"event": "status", "state": state_word(event.state), "text": event.text}
        if event.state in SETTLED:
            line["event"] = "interrupted" if event.state in WAITING else "finished"
            if event.state in WAITING:
                line["prompt"] = event.asked and {
                    "request_id": event.asked.request_id,
                    "number": event.asked.number,
                    "type": event.asked.type,
                    "permission": event.asked.permission,
                    "patterns": [*event.asked.patterns],
                    "questions": [asdict(question) for question in event.asked.questions],
                }
            ids: JsonObject = {"task_id": self._task.task_id, "context_id": self._task.context_id}
            cut: JsonObject = {"cut_short": True} if self._task.cut_short else {}
            return line | ids | {"answer": self._task.answer} | cut
        progress: Json = event.progress and {
            "type": event.progress.type,
            "status": event.progress.status,
            "title": event.progress.title,
            "detail": event.progress.subtitle,
        }
        return line | {"progress": progress}


class BusyLine:
    """One line that says what the agent is busy with and for how long, rewritten in place."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._quiet_since = time.monotonic()
        self._drawn = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def due(self) -> bool:
        """Whether there is something to say: a reason, or a long silence."""
        return self.reason is not None or time.monotonic() - self._quiet_since >= PATIENCE

    def begin(self, tick: Callable[[], None]) -> None:
        """Call back every second until the end."""
        self.reason, self._quiet_since = None, time.monotonic()
        loop = asyncio.get_running_loop()

        def again() -> None:
            tick()
            self._timer = loop.call_later(1, again)

        self._timer = loop.call_later(1, again)

    def interrupt(self) -> None:
        """Make room for something else; the silence is over."""
        self.erase()
        self._quiet_since = time.monotonic()

    def draw(self) -> None:
        seconds = round(time.monotonic() - self._quiet_since)
        waited = f" ({seconds} s)"
        width = max(20, shutil.get_terminal_size().columns - 1 - len(waited))
        text = one_line(self.reason or "Waiting for the agent", width) + waited
        self._control()
        click.secho(text, dim=True, err=True, nl=False)
        self._drawn = True

    def erase(self) -> None:
        if self._drawn:
            self._control()
            self._drawn = False

    def _control(self) -> None:
        """Empty the line; not by click, which leaves that out together with colours."""
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        self.erase()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Screen:
    """Prints a turn for a person, and its bare answer for a program."""

    def __init__(self) -> None:
        self._at_terminal = sys.stderr.isatty()
        self._shared = self._at_terminal and sys.stdout.isatty()
        self._status = BusyLine()
        self._artifact: str | None = None
        self._answer_open = False
        self._behind_answer = False
        """The cursor of the shared terminal stands behind an answer that may continue."""
        self._aside_open = False
        self._state: State | None = None
        self._tools: dict[str, str] = {}
        """The line that was last printed for each tool call."""

    def begin(self) -> None:
        """A turn begins; the event loop runs."""
        self._state = None
        if self._at_terminal:
            self._status.begin(self._tick)

    def end(self) -> None:
        """The turn has ended, or is no longer listened to."""
        self._status.end()
        self.close()

    def close(self) -> None:
        """End the line that the answer or an aside stands on."""
        self._close_aside()
        if self._answer_open:
            click.echo()
            self._answer_open = self._behind_answer = False

    def show(self, event: PeerEvent) -> None:
        match event:
            case AnswerGrew():
                self._answer(event.artifact_id, event.text)
            case AnswerReplaced():
                self._artifact = None  # on a new line: what was printed cannot be taken back
                self._answer(event.artifact_id, event.text)
            case ThoughtGrew():
                self._aside(event.text, closed=False)
            case ToolReported() if event.status != "pending":
                line = one_line(f"{event.tool} {event.status}  {event.title or ''}")
                if self._tools.get(event.call_id) != line:  # its output may grow for a long time
                    self._tools[event.call_id] = line
                    self._aside(line)
            case FileGiven():
                named = event.name or event.artifact_id
                self._aside(one_line(f"file {named} {event.part.media_type or ''}"))
            case TaskStatusChanged(text=None, progress=None) if event.state == self._state:
                pass  # it has a title now, and continues as before
            case TaskStatusChanged() if event.state not in SETTLED:
                self._state = event.state
                self._status.reason = event.progress and progress_text(event.progress)
                if event.progress is None:
                    if event.text:
                        self._aside(indented(event.text))
                    # The reason no longer holds; the next second says what does.
                    self._status.erase()
                elif self._at_terminal:
                    self._break_line()
                    self._status.draw()
            case TaskOpened() | ToolReported() | TaskStatusChanged():
                pass  # what a task ends with is said by ``report_end``

    def _tick(self) -> None:
        if self._status.due and not self._aside_open and not self._behind_answer:
            self._status.draw()

    def _answer(self, artifact_id: str, text: str) -> None:
        self._status.interrupt()
        self._close_aside()
        if self._artifact != artifact_id and self._answer_open:
            click.echo()
        self._artifact = artifact_id
        text = clean(text)
        click.echo(text, nl=False)
        sys.stdout.flush()
        self._answer_open = not text.endswith("\n") if text else self._answer_open
        self._behind_answer = self._answer_open and self._shared

    def _aside(self, text: str, *, closed: bool = True) -> None:
        """Print what is not the answer, dim, for a person alone."""
        if not self._at_terminal:
            return
        self._status.interrupt()
        if closed:
            self._close_aside()
        if not self._aside_open:
            self._break_line()
        click.secho(clean(text), dim=True, err=True, nl=closed)
        self._aside_open = not closed and not text.endswith("\n")

    def _break_line(self) -> None:
        """Leave the line that the answer stands on, if both share a terminal."""
        self._close_aside()
        if self._behind_answer:
            click.echo(err=True)  # to stderr, so that a copy of stdout stays as it came
            self._behind_answer = False

    def _close_aside(self) -> None:
        if self._aside_open:
            click.echo(err=True)
            self._aside_open = False


class Output(Protocol):
    """Shows a turn: a screen, or lines for programs."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def show(self, event: PeerEvent) -> None: ...


def at_terminal() -> bool:
    """Whether a person looks at a terminal that can do more than print lines."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def make_screen(*, full: bool = False) -> "Screen | LiveScreen":
    """Return what shows a turn here; ``full`` shows diffs whole."""
    if not at_terminal():
        return Screen()
    from opencode_a2a.cli.live import LiveScreen  # a tenth of a second, only for people

    return LiveScreen(full=full)


def report_end(talk: "Talk", task: PeerTask) -> None:
    """Say on stderr what a person has to know about the end of a turn."""
    status = task.status
    if status.state in WAITING:
        show_question(task)
    elif status.state is not State.COMPLETED:
        word, text = state_word(status.state), indented(status.text or "").strip()
        click.echo(f"{word}: {text}" if text else word, err=True)
    elif task.cut_short:
        click.echo(CUT_SHORT, err=True)
    if sys.stderr.isatty():
        used = task.usage or Usage()
        took = spent(None, used.read, used.written, used.cost)
        named = f"task {one_line(task.task_id, 100)[:SHORT_ID]}" if task.task_id else None
        words = f"{state_word(status.state)} in {span(talk.seconds)}"
        click.secho(" · ".join(filter(None, (words, took, named))), dim=True, err=True)
    if status.state in WAITING:
        asks = status.state is State.INPUT_REQUIRED
        then = command("call", *talk.named, "--task", task.task_id or "", "…")
        click.echo(f"{'Answer' if asks else 'Sign in, then go on'} with: {then}", err=True)


def show_question(task: PeerTask, keys: str | None = None) -> None:
    """Show what an agent waits for, and the keys that answer it."""
    text = task.said or "The agent waits for an answer."
    if not at_terminal():
        click.echo(indented(text), err=True)
        return
    from opencode_a2a.cli.live import print_question  # only for people

    print_question(text, keys)


# The table of tasks

WATCH_SECONDS = 2.0
_TITLE_ROOM = 18
"""The columns that a title and its mark need at least."""
STATE_GROUPS = {
    "waiting": WAITING,
    "running": frozenset(State) - SETTLED,
    "ended": TERMINAL,
}
"""Words of `--state` that stand for several states."""
_COLOURS = {State.COMPLETED: "green", State.FAILED: "red", **dict.fromkeys(WAITING, "yellow")}


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task as a row of the table."""

    task_id: str
    state: State | None
    title: str
    created: datetime | None
    changed: datetime | None
    cost: float | None

    @classmethod
    def of(cls, task: ReceivedTask) -> "TaskLine":
        about = as_object(task.metadata.get("opencode"))
        usage = read_usage(task.metadata)
        said = task.history[0].text if task.history else task.status.text
        return cls(
            one_line(task.task_id, 100),
            task.status.state,
            one_line(text_in(about, "title") or said or "", 500),
            _time(text_in(about, "created_at")),
            _time(task.status.timestamp),
            usage.cost if usage else None,
        )

    def cells(self, now: datetime) -> tuple[str, ...]:
        began, ended = self.created or self.changed, self.changed
        took = None
        if self.created and ended and self.state in TERMINAL:
            took = (ended - self.created).total_seconds()
        return (
            self.task_id[:SHORT_ID],
            state_word(self.state),
            span((now - began).total_seconds()) if began else "",
            "" if took is None else span(took),
            money(self.cost) if self.cost else "",
            self.title,
        )


def _time(text: str | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def states_named(word: str | None) -> list[State]:
    """Return the states that a word of `--state` stands for."""
    named = STATE_GROUPS.get(word or "", frozenset(State))
    return [one for one in State if one in named and word in (*STATE_GROUPS, state_word(one))]


def print_task_lines(tasks: list[ReceivedTask]) -> None:
    """Print a line with the whole id for each task, for programs."""
    for task in tasks:
        row = TaskLine.of(task)
        when = one_line((task.status.timestamp or "")[:19].replace("T", " "))
        line = f"{row.task_id}  {state_word(row.state):<14}  {when:<19}  {row.title}"
        click.echo(line.rstrip())


def task_table(tasks: list[ReceivedTask], width: int, height: int | None = None) -> list[str]:
    """Return the table for a terminal, cut to ``height`` lines."""
    now = datetime.now(UTC)
    rows = [TaskLine.of(task) for task in tasks]
    heads = ("ID", "STATE", "AGE", "TOOK", "COST", "TITLE")
    cells = [heads, *(row.cells(now) for row in rows)]
    widths = [max(len(one[column]) for one in cells) for column in range(5)]
    for column in (4, 3, 2):  # a narrow screen has no room for all
        if sum(widths) + 2 * sum(map(bool, widths)) + _TITLE_ROOM > width:
            widths[column] = 0
    shown: list[str] = []
    for number, one in enumerate(cells):
        padded = [
            f"{cell:<{size}}" if column < 2 else f"{cell:>{size}}"
            for column, (cell, size) in enumerate(zip(one, widths, strict=False))
        ]
        # An empty column takes no room.
        kept = [cell for cell, size in zip(padded, widths, strict=True) if size]
        room = max(width - sum(map(len, kept)) - 2 * len(kept) - 2, 10)
        state = rows[number - 1].state if number else None
        if number == 0:
            shown.append(click.style("  ".join([*kept, one[5]]), dim=True))
            continue
        kept[1] = click.style(kept[1], fg=_COLOURS.get(state)) if state else kept[1]
        mark = "!" if state in WAITING else " "
        shown.append(f"{'  '.join([*kept, one_line(one[5], room)])} {mark}".rstrip())
    if height is not None and len(shown) > height:
        hidden = len(shown) - height + 1
        shown = [*shown[: height - 1], click.style(f"… {hidden} more", dim=True)]
    return shown


def watch_tasks(read: Callable[[], list[ReceivedTask]], head: str) -> str | None:
    """Redraw the table every two seconds; return the first task's id when Enter is pressed.

    Uses the terminal's alternate screen, so that nothing stays behind. An outage is reported above
    the table as it was.
    """
    tasks = read()
    _control("\x1b[?1049h\x1b[?25l")
    outage: str | None = None
    try:
        while True:
            size = shutil.get_terminal_size()
            waiting = sum(task.status.state in WAITING for task in tasks)
            first = tasks[0].task_id if tasks else None
            state = outage or f"{waiting} waiting   Enter follows the first, Ctrl-C leaves"
            told = f"{head}   {state}"
            drawn = [click.style(one_line(told, size.columns - 1), bold=True), ""]
            drawn += task_table(tasks, size.columns - 1, size.lines - 3) if tasks else ["no tasks"]
            _control("\x1b[H")
            for line in drawn:
                click.echo(line, nl=False)
                _control("\x1b[K\n")
            _control("\x1b[J")
            until = time.monotonic() + WATCH_SECONDS
            while (left := until - time.monotonic()) > 0:
                if select.select([sys.stdin], [], [], left)[0]:
                    if not sys.stdin.readline():
                        return None
                    return first
            try:
                tasks, outage = read(), None
            except click.ClickException as error:
                outage = error.message
    except KeyboardInterrupt:
        return None
    finally:
        _control("\x1b[?25h\x1b[?1049l")


def _control(sequence: str) -> None:
    """Send a control sequence; click would strip it together with colors."""
    sys.stdout.write(sequence)
    sys.stdout.flush()
