"""The spans of a task, folded from its log.

A log says when everything began and ended, so a process that takes a task up after another has died
makes the same spans as that one would have: their ids are made from the task. Nothing here knows
OpenTelemetry's SDK, or does I/O.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import orjson

from opencode_a2a.events import (
    Channel,
    Finished,
    Interrupted,
    Outcome,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    Usage,
    UsageCounted,
)
from opencode_a2a.log.state import Accepted, Entry, Recovered, TaskRef, TaskState
from opencode_a2a.messages import Answered, Message
from opencode_a2a.otel import names

Value = str | bool | int | float | list[str]
NOT_FAILED = frozenset({Outcome.COMPLETED, Outcome.CANCELED, Outcome.AUTH_REQUIRED})
SIGN_IN = "sign_in"
UNKNOWN = "_OTHER"
"""What the conventions call an error that has no type."""


def span_id(task_id: str, what: str) -> str:
    """Return the id of a span of a task; every process makes the same."""
    return blake2b(f"{task_id} {what}".encode(), digest_size=8).hexdigest()


def turn_id(task_id: str, turn: int) -> str:
    return span_id(task_id, f"turn {max(1, turn)}")


@dataclass(slots=True)
class Span:
    """A span; times are milliseconds since the epoch."""

    name: str
    id: str
    parent: str | None
    """None for a turn, which is a part of what the caller does."""
    start: int
    end: int = 0
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    error: bool = False
    events: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    link: str | None = None
    """The id of the span that this one continues."""

    def ended(self, at: int, error: str | None = None) -> "Span":
        self.end = max(self.start, at)
        if error is not None:
            self.error, self.attributes[names.ERROR_TYPE] = True, error
        return self


class TaskSpans:
    """The spans of one task that are open, and those that end with each entry of its log."""

    def __init__(self, ref: TaskRef, *, content: bool = False) -> None:
        """``content``: whether the spans hold what was said, and what tools were given and gave."""
        self._ref = ref
        self._content = content
        self._number = 0
        self._turn: Span | None = None
        self._tools: dict[str, Span] = {}
        self._waits: dict[str, Span] = {}
        self._resume: Span | None = None
        """The part of the turn since this process, or the last one that was restarted, has it."""
        self._usage: UsageCounted | None = None
        self._last = ref.created_at
        """When the last entry was written."""

    @property
    def last(self) -> int:
        return self._last

    def begin(self, at: int, messages: Iterable[Message] = ()) -> None:
        """Begin the next turn."""
        self._number += 1
        self._usage = None
        self._turn = self._span(names.INVOKE_AGENT, turn_id(self._ref.id, self._number), None, at)
        self._turn.attributes |= {names.OPERATION: "invoke_agent", names.TURN: self._number}
        if self._content:
            said = [_message(one.role, one.text) for one in messages]
            self._turn.attributes[names.INPUT_MESSAGES] = orjson.dumps(said).decode()

    def apply(self, entry: Entry, state: TaskState) -> list[Span]:  # noqa: C901 # one case an event
        """Take one entry; return the spans that end with it. ``state`` is the task by then."""
        ended: list[Span] = []
        match entry.event:
            case Accepted(message):
                self.begin(entry.at, [message])
            case Answered(message) if SIGN_IN in self._waits:
                ended.append(self._waits.pop(SIGN_IN).ended(entry.at))
                self.begin(entry.at, [message])
            case Resumed() as resumed:
                if (wait := self._waits.pop(resumed.request_id, None)) is not None:
                    wait.attributes[names.WAIT_OUTCOME] = resumed.resolution
                    wait.attributes[names.WAIT_BY] = _by(resumed)
                    ended.append(wait.ended(entry.at))
                if resumed.type == "plan":
                    self.begin(entry.at)
            case Interrupted() as asked:
                if asked.type == "plan":
                    ended += self._end_turn(entry, state, None)
                self._wait(asked.request_id, asked.type, entry.at)
            case ToolChanged() as tool:
                ended += self._tool(tool, entry.at)
            case UsageCounted() as usage:
                self._usage = usage
            case SessionBound(session_id=session_id) if self._turn is not None:
                self._turn.attributes[names.SESSION] = session_id
            case Started() if self._turn is not None:
                self._turn.events.append((names.STARTED, entry.at))
            case TextGrew(opens=True) if self._turn is not None:
                self._turn.events.append((names.FIRST_TEXT, entry.at))
            case Recovered():
                ended += self.resume(entry.at, f"resume {entry.seq}", "resumed")
            case Finished() as end:
                ended += self._end_turn(entry, state, end)
                ended += (wait.ended(entry.at) for wait in self._waits.values())
                self._waits.clear()
                if end.outcome is Outcome.AUTH_REQUIRED:
                    self._wait(SIGN_IN, SIGN_IN, entry.at)
            case _:
                pass
        self._last = entry.at
        return ended

    def resume(self, at: int, what: str, how: str) -> list[Span]:
        """Note that another process continues the turn; return the span of the one before."""
        if self._turn is None:
            return []
        before, turn = self._resume, self._turn
        self._resume = self._span(names.RESUME, span_id(self._ref.id, what), turn.id, at)
        self._resume.attributes[names.LINK] = how
        self._resume.link = turn.id if before is None else before.id
        return [] if before is None else [before.ended(self._last)]

    def leave(self, at: int) -> list[Span]:
        """Return the span that ends when this process hands the task over."""
        resume, self._resume = self._resume, None
        return [] if resume is None else [resume.ended(at)]

    def _span(self, name: str, name_id: str, parent: str | None, at: int) -> Span:
        about: dict[str, Value] = {
            names.CONVERSATION: self._ref.context_id,
            names.TASK: self._ref.id,
        }
        return Span(name, name_id, parent, at, attributes=about)

    def _inner(self, name: str, what: str, at: int) -> Span:
        return self._span(
            name, span_id(self._ref.id, what), turn_id(self._ref.id, self._number), at
        )

    def _wait(self, key: str, kind: str, at: int) -> None:
        wait = self._inner(names.WAIT, f"wait {self._number} {key}", at)
        wait.attributes[names.WAIT_KIND] = kind
        self._waits[key] = wait

    def _tool(self, tool: ToolChanged, at: int) -> list[Span]:
        span = self._tools.get(tool.part_id)
        if span is None:
            span = self._inner(f"{names.EXECUTE_TOOL} {tool.tool}", f"tool {tool.part_id}", at)
            span.attributes |= {
                names.OPERATION: names.EXECUTE_TOOL,
                names.TOOL: tool.tool,
                names.TOOL_CALL: tool.call_id,
            }
            self._tools[tool.part_id] = span
        # A part may be reported again, complete as it was: it is one call, and one span.
        if not tool.complete or span.end:
            return []
        if self._content:
            span.attributes[names.TOOL_ARGUMENTS] = orjson.dumps(tool.input).decode()
            span.attributes[names.TOOL_RESULT] = tool.output or tool.error or ""
        return [span.ended(at, UNKNOWN if tool.status == "error" else None)]

    def _end_turn(self, entry: Entry, state: TaskState, end: Finished | None) -> list[Span]:
        """Return the spans that end with a turn: what it still did, and itself."""
        turn, at = self._turn, entry.at
        if turn is None:  # the task ended between two turns
            return []
        status = entry.status or state.status
        ended = [tool.ended(at, "aborted") for tool in self._tools.values() if not tool.end]
        ended += self.leave(at)
        self._tools.clear()
        self._turn = None
        if status.agent:
            turn.name = f"{names.INVOKE_AGENT} {status.agent}"
            turn.attributes[names.AGENT] = status.agent
        if status.model:
            provider, _, model = status.model.partition("/")
            turn.attributes |= {
                names.PROVIDER: provider,
                names.REQUEST_MODEL: model,
                names.RESPONSE_MODEL: model,
            }
        if self._usage is not None:
            turn.attributes |= _usage(self._usage)
        turn.attributes[names.TASK_STATE] = status.state.value
        if self._content and (text := state.channels.get(Channel.TEXT)) is not None:
            said = [_message("assistant", text.text)]
            turn.attributes[names.OUTPUT_MESSAGES] = orjson.dumps(said).decode()
        error = None
        if end is not None:
            if end.finish:
                turn.attributes[names.FINISH_REASONS] = [end.finish]
            if end.outcome not in NOT_FAILED:
                error = end.failure.type if end.failure else UNKNOWN
        return [*ended, turn.ended(at, error)]


def _message(role: str, text: str) -> Mapping[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _by(resumed: Resumed) -> str:
    """Return what settled an interrupt, without the name of a person."""
    if resumed.resolution in ("expired", "void"):
        return "deadline" if resumed.resolution == "expired" else "nobody"
    return "rule" if resumed.by == "rule" else "person"


def _usage(counted: UsageCounted) -> dict[str, Value]:
    used = counted.own + (counted.children or Usage())
    return {
        names.INPUT_TOKENS: used.read,
        names.OUTPUT_TOKENS: used.written,
        names.CACHE_READ_TOKENS: used.cache_read,
        names.CACHE_WRITE_TOKENS: used.cache_write,
        names.COST: used.cost,
    }
