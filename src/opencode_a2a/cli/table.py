"""The tasks of an agent as a table that fits the screen, once or kept up to date.

Programs get a line with whole ids for each task instead. Nothing here knows the network.
"""

import select
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from opencode_a2a.figures import SHORT_ID, money, span
from opencode_a2a.jsonguard import as_object, text_in
from opencode_a2a.peers.answer import SETTLED, WAITING, ReceivedTask, state_word
from opencode_a2a.printable import one_line
from opencode_a2a.tasks.state import TERMINAL, State

WATCH_SECONDS = 2.0
KINDS = {
    "waiting": WAITING,
    "running": frozenset(State) - SETTLED,
    "ended": TERMINAL,
}
"""Words for several states at once."""
_COLOURS = {State.COMPLETED: "green", State.FAILED: "red", **dict.fromkeys(WAITING, "yellow")}


@dataclass(frozen=True, slots=True)
class Row:
    """What is shown of a task."""

    task_id: str
    state: State | None
    title: str
    created: datetime | None
    changed: datetime | None
    cost: float | None

    @classmethod
    def of(cls, task: ReceivedTask) -> "Row":
        about = as_object(task.metadata.get("opencode"))
        usage = as_object(as_object(task.metadata.get("shared")).get("usage"))
        cost = usage.get("cost")
        said = task.history[0].text if task.history else task.status.text
        return cls(
            one_line(task.task_id, 100),
            task.status.state,
            one_line(text_in(about, "title") or said or "", 500),
            _time(text_in(about, "created_at")),
            _time(task.status.timestamp),
            cost if isinstance(cost, int | float) else None,
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


def wanted(task: ReceivedTask, state: str | None) -> bool:
    """Whether a task is in a state, which has its own word or that of several."""
    kind = KINDS.get(state or "")
    if kind is not None:
        return task.status.state in kind
    return state is None or state_word(task.status.state) == state


def print_lines(tasks: list[ReceivedTask]) -> None:
    """Print a line for each task, for programs."""
    for task in tasks:
        row = Row.of(task)
        when = one_line((task.status.timestamp or "")[:19].replace("T", " "))
        line = f"{row.task_id}  {state_word(row.state):<14}  {when:<19}  {row.title}"
        click.echo(line.rstrip())


def lines(tasks: list[ReceivedTask], width: int, height: int | None = None) -> list[str]:
    """Return the table for a person, at most so many lines of it."""
    now = datetime.now(UTC)
    rows = [Row.of(task) for task in tasks]
    heads = ("ID", "STATE", "AGE", "TOOK", "COST", "TITLE")
    cells = [heads, *(row.cells(now) for row in rows)]
    widths = [max(len(one[column]) for one in cells) for column in range(5)]
    shown: list[str] = []
    for number, one in enumerate(cells):
        padded = [
            f"{cell:<{size}}" if column < 2 else f"{cell:>{size}}"
            for column, (cell, size) in enumerate(zip(one, widths, strict=False))
        ]
        # A column that nobody fills has no room of its own.
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


def watch(read: Callable[[], list[ReceivedTask]], head: str) -> str | None:
    """Draw the table anew every two seconds; return the newest task's id when Enter is pressed.

    The other screen of the terminal is used, so that nothing of it stays behind.
    """
    _control("\x1b[?1049h\x1b[?25l")
    newest: str | None = None
    try:
        while True:
            tasks = read()
            size = shutil.get_terminal_size()
            waiting = sum(task.status.state in WAITING for task in tasks)
            newest = tasks[0].task_id if tasks else None
            told = f"{head}   {waiting} waiting   Enter follows the newest, Ctrl-C leaves"
            drawn = [click.style(one_line(told, size.columns - 1), bold=True), ""]
            drawn += lines(tasks, size.columns - 1, size.lines - 3) if tasks else ["no tasks"]
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
                    return newest
    except KeyboardInterrupt:
        return None
    finally:
        _control("\x1b[?25h\x1b[?1049l")


def _control(sequence: str) -> None:
    """Steer the terminal; not by click, which leaves that out together with colours."""
    sys.stdout.write(sequence)
    sys.stdout.flush()
