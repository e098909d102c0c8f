"""What OpenCode services say in metadata, read into types.

``peers.answer`` asks here which channel a chunk belongs to, what a tool does and what a prompt
asks. Agents of another make say nothing of it: then everything is answer text, and a prompt is
the words of its status message. Also holds the small readers of untyped JSON for ``peers``.
"""

from dataclasses import dataclass, field
from typing import Literal

from opencode_a2a.events import Json, JsonObject, Question, QuestionOption


@dataclass(frozen=True, slots=True)
class Prompt:
    """A permission or questions that OpenCode waits for."""

    request_id: str
    type: Literal["permission", "question"]
    permission: str | None = None
    patterns: list[str] = field(default_factory=list[str])
    questions: list[Question] = field(default_factory=list[Question])


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    tool: str
    status: str
    title: str | None
    payload: JsonObject


def read_channel(metadata: JsonObject) -> str:
    """Return text, reasoning or tool_call; text when nothing is said."""
    return text_in(_shared(metadata, "stream"), "block_type") or "text"


def read_tool(data: Json, artifact_id: str) -> ToolCall:
    payload = as_object(data)
    payload = as_object(payload.get("data")) or payload  # 0.3 on HTTP+JSON nests it
    return ToolCall(
        text_in(payload, "call_id") or artifact_id,
        text_in(payload, "tool") or "tool",
        text_in(payload, "status") or "",
        text_in(payload, "title"),
        payload,
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """A sign of life that says why there is nothing else to see."""

    type: str
    status: str
    title: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str:
        """Say it in a few words: ``Retrying: Cannot connect to API, attempt 4``."""
        told = ", ".join(filter(None, (self.title, self.detail))) or self.status
        return f"{_PROGRESS.get(self.type, self.type)}: {told}"


_PROGRESS = {
    "retry": "Retrying",
    "queue": "Queued",
    "compaction": "Compacting the conversation",
    "subagent": "Sub-agent",
    "peer": "Asking another agent",
    "permission": "Permission",
    "recovered": "Recovered",
    "todo": "Plan",
}
_UNREMARKABLE = frozenset({"step-start", "step-finish"})
_OVER = frozenset({"completed", "error"})


def read_progress(metadata: JsonObject) -> Progress | None:
    """Return what a status says of progress, unless that is the ordinary course or is over."""
    told = _shared(metadata, "progress")
    kind, status = text_in(told, "type") or "", text_in(told, "status") or ""
    if not told or kind in _UNREMARKABLE or status in _OVER:
        return None
    if kind == "todo":
        todos = items_in(told, "todos")
        at_work = [one for one in todos if one.get("status") == "in_progress"]
        current = text_in(at_work[0], "content") if at_work else None
        done = sum(one.get("status") == "completed" for one in todos)
        return Progress(kind, status, current, f"{done} of {len(todos)} done")
    detail = text_in(told, "subtitle", "reason")
    return Progress(kind, status, text_in(told, "title"), detail)


def read_prompt(metadata: JsonObject) -> Prompt | None:
    """Return the prompt that a status of ``input-required`` is about, if it is told."""
    asked = _shared(metadata, "interrupt")
    request_id = text_in(asked, "request_id")
    if request_id is None:
        return None
    details = as_object(asked.get("details"))
    if asked.get("type") == "question":
        questions = [_question(item) for item in items_in(details, "questions")]
        return Prompt(request_id, "question", questions=questions)
    patterns = details.get("patterns")
    listed = patterns if isinstance(patterns, list) else []
    named = [pattern for pattern in listed if isinstance(pattern, str)]
    return Prompt(request_id, "permission", text_in(details, "permission"), named)


def _question(value: JsonObject) -> Question:
    options = [
        QuestionOption(text_in(item, "label") or "", text_in(item, "description") or "")
        for item in items_in(value, "options")
    ]
    return Question(
        text_in(value, "question") or "",
        text_in(value, "header") or "",
        options,
        value.get("multiple") is True,
        value.get("custom") is not False,
    )


def _shared(metadata: JsonObject, name: str) -> JsonObject:
    return as_object(as_object(metadata.get("shared")).get(name))


def as_object(value: Json) -> JsonObject:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items_in(value: JsonObject, key: str) -> list[JsonObject]:
    """The objects in the list under a key; what is no object is passed over."""
    listed = value.get(key)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def text_in(value: JsonObject, *keys: str) -> str | None:
    """The first of the keys that holds a string."""
    return next((text for key in keys if isinstance(text := value.get(key), str)), None)
