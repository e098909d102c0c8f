"""A turn at a terminal: Markdown, tool calls updated in place, and a line for what is awaited.

``screen`` decides when to use this, and prints in all other cases. Finished output is printed and
stays. Below it, a region that may still change is redrawn: the open block of the answer, the
running tool calls, and the line about waiting. Everything that an agent sends is cleaned before it
is drawn, and again after Markdown was parsed, which has names for characters. Text of an agent is
never read as markup of ``rich``.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

from opencode_a2a.cli.screen import PATIENCE
from opencode_a2a.jsonguard import as_object, text_in
from opencode_a2a.log.state import State
from opencode_a2a.media import DIFF_TYPE
from opencode_a2a.peers.received import (
    SETTLED,
    AnswerGrew,
    AnswerReplaced,
    FileGiven,
    PeerEvent,
    TaskOpened,
    TaskStatusChanged,
    ThoughtGrew,
    ToolReported,
    decode_text,
    progress_text,
)
from opencode_a2a.printable import clean, one_line, span, visible

DIFF_LINES = 40
_OUTPUT_LINES = 5
_FRAME_SECONDS = 0.1
_INPUTS = ("command", "filePath", "path", "pattern", "url", "query")
"""Fields of a tool's input that say what it is about, the most telling first."""
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def new_console() -> Console:
    """Return a console that takes nothing in a text for markup, and leaves the background alone."""
    theme = Theme({"markdown.code": "bold cyan", "markdown.code_block": "cyan"})
    return Console(highlight=False, markup=False, emoji=False, theme=theme)


class LeftHeading(Heading):
    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class Prose(Markdown):
    """Markdown of an agent: no HTML, which would vanish, and no links with another address."""

    elements: ClassVar = {**Markdown.elements, "heading_open": LeftHeading}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self.parsed = parser.parse(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for rendered in super().__rich_console__(console, options):
            parts = (
                [rendered] if isinstance(rendered, Segment) else console.render(rendered, options)
            )
            for part in parts:
                yield part if part.control else Segment(clean(part.text), part.style)


class Blocks:
    """Cuts growing Markdown where a block has ended: at an empty line outside of a fence."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._tail = ""
        self._fence = ""
        self._ended = False

    @property
    def open(self) -> str:
        """What is not complete yet."""
        return "".join(self._lines) + self._tail

    def add(self, text: str) -> Iterator[str]:
        """Take more text, and yield the blocks that it completes."""
        *whole, self._tail = (self._tail + text).split("\n")
        for line in whole:
            # A line that is indented belongs to the list before the empty line.
            if self._ended and line and not line[0].isspace():
                yield self.take()
            self._ended = not self._fence and not line.strip()
            self._lines.append(f"{line}\n")
            mark = line.lstrip()[:3]
            if self._fence:
                if line.strip().startswith(self._fence) and not line.strip().strip(mark[:1]):
                    self._fence = ""
            elif mark in ("```", "~~~"):
                self._fence = mark

    def take(self) -> str:
        """Return what is there, and begin anew; a fence stays open."""
        text = "".join(self._lines)
        self._lines.clear()
        self._ended = False
        return text

    def rest(self) -> str:
        """Return everything that is left."""
        text = self.open
        self.__init__()
        return text


@dataclass(slots=True)
class ToolRow:
    """A tool call on the screen."""

    event: ToolReported
    began: float

    @property
    def about(self) -> str:
        given = as_object(self.event.payload.get("input"))
        # All of them: a model may send a field that the tool does not use.
        told = [text for name in _INPUTS if (text := text_in(given, name))]
        said = text_in(given, "description") or text_in(given, "agent")
        return " · ".join(told) or said or self.event.title or ""

    def line(self, width: int, seconds: float | None) -> Text:
        sign, style = {"completed": ("✓", "green"), "error": ("✗", "red")}.get(
            self.event.status, ("●", "yellow")
        )
        took = "" if seconds is None else f"  {span(seconds)}"
        tool = one_line(self.event.tool, 30)
        room = max(width - len(tool) - len(took) - 5, 10)
        line = Text.assemble((f"{sign} ", style), (tool, "bold"), "  ", one_line(self.about, room))
        return line.append(took, "dim")

    def output(self) -> list[str]:
        """Return the last lines that it printed."""
        payload = self.event.payload
        printed = text_in(payload, "output") or text_in(
            as_object(payload.get("metadata")), "output"
        )
        lines = [line for line in (printed or "")[-4000:].splitlines() if line.strip()]
        return [one_line(line, 500) for line in lines[-_OUTPUT_LINES:]]


@dataclass(frozen=True, slots=True)
class Region:
    """What may still change, as it is when it is drawn."""

    screen: "LiveScreen"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.screen.region()


class LiveScreen:
    """Shows a turn at a terminal that has both stdout and stderr."""

    def __init__(self, *, full: bool = False) -> None:
        self._console = new_console()
        self._full = full
        """Whether diffs are shown whole."""
        self._live: Live | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drawn = 0
        self._changed = False
        self._quiet_since = time.monotonic()
        self._reason: str | None = None
        self._state: State | None = None
        self._artifact: str | None = None
        self._answer = Blocks()
        self._thought = ""
        self._tools: dict[str, ToolRow] = {}
        self._ended_tools: set[str] = set()
        self._spaced = True
        """Whether what comes next needs no empty line before it."""

    def begin(self) -> None:
        """A turn begins; the event loop runs."""
        self._quiet_since, self._state = time.monotonic(), None
        self._live = Live(
            Region(self),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        loop = asyncio.get_running_loop()

        def frame() -> None:
            second = int(time.monotonic() - self._quiet_since)
            if self._live and (self._changed or second != self._drawn):
                self._changed, self._drawn = False, second
                self._live.refresh()
            self._timer = loop.call_later(_FRAME_SECONDS, frame)

        self._timer = loop.call_later(_FRAME_SECONDS, frame)

    def end(self) -> None:
        """The turn has ended, or is no longer listened to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.close()
        if self._live is not None:
            self._tools.clear()
            self._reason, self._quiet_since = None, time.monotonic()
            self._live.stop()
            self._live = None

    def close(self) -> None:
        """Print what is still open."""
        self._close_thought()
        self._close_answer()

    def show(self, event: PeerEvent) -> None:
        self._changed = True
        match event:
            case AnswerGrew():
                self._take_answer(event.artifact_id, event.text)
            case AnswerReplaced():
                self._close_answer()  # what was printed cannot be taken back
                self._take_answer(event.artifact_id, event.text)
            case ThoughtGrew():
                self._awake()
                self._close_answer()
                *lines, self._thought = (self._thought + clean(event.text)).split("\n")
                for line in lines:
                    self._print(Text(line, "dim italic"))
            case ToolReported() if event.status != "pending":
                self._take_tool(event)
            case FileGiven():
                self._take_file(event)
            case TaskStatusChanged(text=None, progress=None) if event.state == self._state:
                pass  # it has a title now, and continues as before
            case TaskStatusChanged() if event.state not in SETTLED:
                self._state = event.state
                self._reason = event.progress and progress_text(event.progress)
                if event.progress is None and event.text:
                    self.close()
                    self._print(Text(one_line(event.text, 500), "dim"))
            case TaskOpened() | ToolReported() | TaskStatusChanged():
                pass  # what a task ends with is said by ``report_end``

    def _take_answer(self, artifact_id: str, text: str) -> None:
        self._awake()
        self._close_thought()
        if self._artifact != artifact_id:
            self._close_answer()
            self._artifact = artifact_id
        for block in self._answer.add(clean(text)):
            self._print_block(block)

    def _take_tool(self, event: ToolReported) -> None:
        self._awake()
        if event.call_id in self._ended_tools:
            return
        row = self._tools.get(event.call_id)
        if row is None:
            self.close()
            row = self._tools[event.call_id] = ToolRow(event, time.monotonic())
        row.event = event
        if event.status in ("completed", "error"):
            self._ended_tools.add(event.call_id)
            del self._tools[event.call_id]
            seconds = time.monotonic() - row.began if self._live else None
            self._space()
            self._print(row.line(self._console.width, seconds))
            if event.status == "error" and (why := text_in(event.payload, "error")):
                self._print(Text(f"  {one_line(why, self._console.width - 4)}", "red"))

    def _take_file(self, event: FileGiven) -> None:
        self.close()
        part = event.part
        patch = decode_text(part.raw) if part.media_type == DIFF_TYPE and part.raw else None
        if patch is not None:
            self._space()
            self._print(diff_text(patch, None if self._full else DIFF_LINES))
            self._spaced = False
        elif event.name != "diff":  # which is a summary of the same
            named = event.name or event.artifact_id
            self._print(Text(one_line(f"file {named} {event.part.media_type or ''}"), "dim"))

    def _close_thought(self) -> None:
        if self._thought:
            self._print(Text(self._thought, "dim italic"))
            self._thought = ""

    def _close_answer(self) -> None:
        if text := self._answer.rest():
            self._print_block(text)

    def _print_block(self, text: str) -> None:
        if text.strip():
            self._space()
            self._print(Prose(text))
            self._spaced = False

    def _space(self) -> None:
        if not self._spaced:
            self._print(Text())
            self._spaced = True

    def _print(self, what: RenderableType) -> None:
        self._console.print(what)

    def _awake(self) -> None:
        """Note that there is news; the silence is over."""
        self._quiet_since, self._drawn = time.monotonic(), 0

    def region(self) -> RenderableType:
        """Return what may still change."""
        width, room = self._console.width, max(self._console.height - 4, 4)
        shown: list[RenderableType] = []
        if self._thought:
            shown.append(Text(self._thought, "dim italic"))
        if text := self._answer.open:
            wrapped = Text(text.rstrip("\n")).wrap(self._console, width)
            shown += wrapped[-room:]
        for row in [*self._tools.values()][-room // 3 :]:
            shown.append(row.line(width, time.monotonic() - row.began))
            shown += [
                Text(f"  {line}", "dim", overflow="ellipsis", no_wrap=True) for line in row.output()
            ]
        silence = time.monotonic() - self._quiet_since
        if self._reason is not None or (silence >= PATIENCE and not self._tools):
            waited = f" ({silence:.0f} s)"
            reason = one_line(self._reason or "Waiting for the agent", width - len(waited) - 1)
            shown.append(Text(reason + waited, "dim"))
        return Group(*shown[-room:])


def diff_text(patch: str, most: int | None) -> Text:
    """Return a diff in colours, at most so many lines of it."""
    lines = visible(patch).splitlines()
    shown = lines if most is None or len(lines) <= most else lines[:most]
    text = Text()
    for line, style in _diff_styles(shown):
        text.append(f"{line}\n", style)
    if left := len(lines) - len(shown):
        text.append(f"… {left} more lines; --full or /diff shows all\n", "dim")
    text.right_crop(1)
    return text


def _diff_styles(lines: Iterable[str], indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield lines with their colours; those of a diff may be indented.

    Which lines belong to the text is told by the counts of a hunk, since a line that is removed or
    added can look like the head of a file.
    """
    old = new = 0
    for line in lines:
        mark = line.removeprefix(indent) if line.startswith(indent) else ""
        if old > 0 or new > 0:
            old -= not mark.startswith(("+", "\\"))
            new -= not mark.startswith(("-", "\\"))
            yield line, {"+": "green", "-": "red"}.get(mark[:1], "")
        elif hunk := _HUNK.match(mark):
            old, new = (int(count or 1) for count in hunk.groups())
            yield line, "cyan"
        else:
            head = mark.startswith(("+++", "---", "diff ", "index "))
            yield line, "bold" if head else {"+": "green", "-": "red"}.get(mark[:1], "")


def print_diff(patch: str) -> None:
    """Print a whole diff."""
    new_console().print(diff_text(patch, None))


# Not indented: a command that is asked for cannot look like it.
_DEADLINE = re.compile(r"^(If nobody answers by )(\d{4}-\d\d-\d\dT[\d:.]{8,15}Z)", re.MULTILINE)


def _local_time(found: re.Match[str]) -> str:
    """Tell a deadline as the clock here does."""
    try:
        here = datetime.fromisoformat(found[2]).astimezone()
    except ValueError:
        return found[0]
    today = here.date() == datetime.now(UTC).astimezone().date()
    return found[1] + here.strftime("%H:%M" if today else "%Y-%m-%d %H:%M")


def print_question(text: str, keys: str | None) -> None:
    """Print what an agent asks in a frame, with the keys that answer it.

    What the agent wrote is indented, also where a line that is too long continues.
    """
    console, rows, text = new_console(), list[RenderableType](), _DEADLINE.sub(_local_time, text)
    for line, style in _diff_styles(visible(text).strip().splitlines(), "    "):
        indent = min(len(line) - len(line.lstrip(" ")), 8)
        hanging = max(indent, 2)
        room = max(console.width - 4 - hanging, 1)  # within the frame
        pieces = Text(line[indent:], style).wrap(console, room) or [Text()]
        rows += (
            Padding(piece, (0, 0, 0, hanging if number else indent))
            for number, piece in enumerate(pieces)
        )
    if keys:
        rows.append(Text(f"\n{keys}", "bold"))
    console.print(
        Panel(Group(*rows), title="The agent asks", title_align="left", border_style="yellow")
    )
