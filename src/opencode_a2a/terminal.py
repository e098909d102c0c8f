"""Renders log records for a person at the service's terminal: a banner, and a line per event.

``telemetry`` writes records through ``Lines`` if stderr is a terminal, and as JSON otherwise.
Nothing here knows which part of the service logged them.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final, TextIO, cast

import structlog

from opencode_a2a.printable import (
    SHORT_ID,
    clean,
    clock,
    colours,
    joined,
    one_line,
    short_path,
    spent,
)

Record = Mapping[str, object]

DIM, BOLD, RED, YELLOW, GREEN = "2", "1", "31", "33", "32"
_ENDS = {"completed": GREEN, "failed": RED, "rejected": YELLOW, "canceled": YELLOW}
_SETTLED = {
    "once": "allowed",
    "always": "allowed",
    "rejected": "denied",
    "replied": "answered",
    "void": "withdrawn",
}
_OMITTED = {"event", "level", "timestamp", "logger", "audit", "request_id", "trace_id"}
"""Fields of a record that are not shown as ``name=value``."""


class StatusLine:
    """The last line of the terminal, while something is waited for; records take its place."""

    def __init__(self) -> None:
        self.output: TextIO | None = None
        """The terminal, if there is one whose lines can be written anew."""
        self._shown = False

    def removed(self) -> str:
        """Return what removes the line, to be printed before anything else."""
        shown, self._shown = self._shown, False
        return "\r\x1b[K" if shown else ""

    @asynccontextmanager
    async def waiting(self, text: str) -> AsyncGenerator[None]:
        """Say what is waited for, and for how long, as long as the context lasts."""
        if self.output is None:
            yield
            return
        counting = asyncio.create_task(self._count(text, self.output))
        try:
            yield
        finally:
            counting.cancel()
            await asyncio.wait([counting])
            print(self.removed(), end="", file=self.output, flush=True)

    async def _count(self, text: str, output: TextIO) -> None:
        began = time.monotonic()
        while True:
            seconds = int(time.monotonic() - began)
            passed = f" {seconds} s" if seconds else ""
            print(f"{self.removed()}{text} …{passed}", end="", file=output, flush=True)
            self._shown = True
            await asyncio.sleep(1)


STATUS: Final = StatusLine()


class Lines:
    """A processor for structlog that renders each record as text."""

    def __init__(self, *, everything: bool) -> None:
        self._all = everything
        """Whether all records are shown, not only those of tasks, warnings and audit records."""
        self._coloured = colours(os.environ)

    def __call__(self, _: object, __: str, record: Record) -> str:
        text = self._rendered(record)
        return f"{STATUS.removed()}{text}"

    def _rendered(self, record: Record) -> str:
        match record.get("event"):
            case "started":
                return self._banner(record)
            case "opencode answers":
                return self._facts(record)
            case "stopping":
                return self._farewell(record)
            case "stopped":
                return self._paint("Stopped.", DIM)
            case "task started":
                title = f'"{one_line(str(record.get("title") or ""), 200)}"'
                return self._line(record, "started", title, str(record.get("principal") or ""))
            case "task asks":
                until = record.get("until")
                by = f"until {clock(until)}" if isinstance(until, int) else ""
                what = one_line(str(record.get("what") or ""), 200)
                return self._line(record, "asks", what, by, YELLOW)
            case "task ended":
                return self._task_ended(record)
            case "interrupt settled":
                resolution = str(record.get("resolution"))
                named = str(record.get("permission") or record.get("type"))
                if record.get("permission"):
                    named += f": {', '.join(_texts(record, 'patterns')) or '(could not be read)'}"
                by = f"by {record['by']}" if record.get("by") else ""
                word = _SETTLED.get(resolution, resolution)
                return self._line(record, word, one_line(named, 200), by)
            case _:
                if not self._all and record.get("level") == "info" and not record.get("audit"):
                    raise structlog.DropEvent
                return self._other(record)

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._coloured else text

    # Start and stop

    def _banner(self, record: Record) -> str:
        head = [f"opencode-a2a {record['version']}"]
        if record.get("opencode"):
            head.append(f"OpenCode {record['opencode']}")
        head.append(f"ready in {record['seconds']:.1f} s")
        url = str(record["url"])
        rows = [
            ("Console", f"{url}/console", f"{record['program']} console signs you in"),
            ("Agent", url, f"A2A {' and '.join(_texts(record, 'protocol_versions'))}"),
        ]
        if workspace := record.get("workspace"):
            shown = short_path(str(workspace), os.environ)
            rows.append(("Workspace", shown, "the agent can change these files"))
        else:
            rows.append(("OpenCode", str(record.get("opencode_url")), "works where it was started"))
        if len(names := _texts(record, "upstreams")) > 1:
            rows.append(("OpenCodes", ", ".join(names), ""))
        if file := record.get("token_file"):
            rows.append(("Token", short_path(str(file), os.environ), "for other clients"))
        counts = [
            f"{record[name]} {text}"
            for name, text in (("waiting", "waiting for an answer"), ("running", "running"))
            if record.get(name)
        ]
        rows.append(
            ("Tasks", ", ".join(counts) or "none open", f"{record['program']} tasks lists them")
        )
        lines = [self._paint(" · ".join(head), BOLD), "", *self._rows(rows)]
        if problem := record.get("problem"):
            lines += ["", self._paint(f"  Problem    {problem}", RED)]
        return "\n".join(lines)

    def _facts(self, record: Record) -> str:
        model, hosted = str(record.get("model") or "none"), bool(record.get("hosted"))
        key = "for a real one set ANTHROPIC_API_KEY, or run `opencode auth login`"
        if record.get("demo"):
            rows = [("Model", "demo (scripted, no AI)", key)]
        elif not record.get("model"):
            rows = [("Model", "none is set up", key.replace("a real one", "one"))]
        else:
            note = "hosted by OpenCode: your code leaves this machine" if hosted else ""
            rows = [("Model", model, note)]
        asks, unasked = _texts(record, "asks"), _texts(record, "unasked")
        if asks:
            off = "--ask=none to stop that" if record.get("can_ask") else ""
            rows.append(("Asks", f"before {joined(asks)}", off))
        if unasked:
            on = "--ask makes it ask" if record.get("can_ask") and not asks else ""
            rows.append(("Unasked", joined(unasked), on))
        lines = self._rows(rows)
        for note in _texts(record, "notes"):
            lines.append(self._paint(f"  {'Note':<9}  {note}", YELLOW))
        if suggestion := record.get("try"):
            stop = self._paint("Ctrl-C stops the service", DIM)
            lines += ["", f"  {'Try':<9}  {suggestion}    {stop}", ""]
        return "\n".join(lines)

    def _rows(self, rows: list[tuple[str, str, str]]) -> list[str]:
        columns = shutil.get_terminal_size().columns
        lines: list[str] = []
        for name, value, note in rows:
            line = f"  {name:<9}  {value:<38}"
            shown = self._paint(one_line(note, columns - 14), DIM)
            if len(line) + 2 + len(note) > columns:
                lines += [line.rstrip(), f"{'':<13}{shown}"]
            else:
                lines.append(f"{line}  {shown}" if note else line.rstrip())
        return lines

    def _farewell(self, record: Record) -> str:
        waiting, working = _texts(record, "waiting"), _texts(record, "working")
        sentences = ["Stopping."]
        for word, tasks in (("Waiting for an answer", waiting), ("Running", working)):
            if tasks:
                more = f" and {len(tasks) - 10} more" if len(tasks) > 10 else ""
                sentences.append(f"{word}: {', '.join(tasks[:10])}{more}.")
        return "\n".join([" ".join(sentences), *_texts(record, "notes")])

    # Tasks and other records

    def _task_ended(self, record: Record) -> str:
        state = str(record.get("state"))
        took = spent(
            _number(record, "seconds"),
            int(_number(record, "input_tokens")),
            int(_number(record, "output_tokens")),
            _number(record, "cost"),
        )
        reason = one_line(str(record.get("reason") or ""), 300)
        text = f"{took} · {reason}" if reason else took
        return self._line(record, state, text, style=_ENDS.get(state, ""))

    def _other(self, record: Record) -> str:
        level = str(record.get("level", "info"))
        style = RED if level in ("error", "critical") else YELLOW if level == "warning" else ""
        fields = [
            f"{key}={one_line(str(value), 200)}"
            for key, value in record.items()
            if key not in _OMITTED | {"task_id", "exception"} and value is not None
        ]
        word = "audit" if record.get("audit") else level
        text = "  ".join([one_line(str(record.get("event")), 500), *fields])
        line = self._line(record, word, text, style=style, cut=False)
        exception = record.get("exception")
        return f"{line}\n{clean(str(exception))}" if exception else line

    def _line(
        self,
        record: Record,
        word: str,
        text: str,
        note: str = "",
        style: str = "",
        *,
        cut: bool = True,
    ) -> str:
        now = time.strftime("%H:%M:%S")
        task = one_line(str(record.get("task_id") or ""), 100)[:SHORT_ID]
        head = f"{now}  {task:<{SHORT_ID}}  "
        room = shutil.get_terminal_size().columns - len(head) - 12
        if cut and room > 20:
            note = one_line(note, max(room // 3, 12))
            text = one_line(text, room - (len(note) + 2 if note else 0))
        padded = f"{word:<10}"
        shown = self._paint(padded, style) if style else padded
        end = f"  {self._paint(note, DIM)}" if note else ""
        return f"{self._paint(head, DIM)}{shown}  {text}{end}".rstrip()


def _texts(record: Record, name: str) -> list[str]:
    value = record.get(name)
    return [*map(str, cast("list[object]", value))] if isinstance(value, list | tuple) else []


def _number(record: Record, name: str) -> float:
    value = record.get(name)
    return value if isinstance(value, int | float) else 0.0
