"""OpenCode's values as turn events, one by one and without any memory.

``opencode.reader`` decides what is told and when; here is only how it looks.
"""

from collections.abc import Sequence
from dataclasses import replace

from opencode_a2a.events import (
    DiffChanged,
    FileChange,
    Interrupted,
    JsonObject,
    Question,
    QuestionOption,
    ToolChanged,
    Usage,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    FileDiff,
    PermissionRequest,
    QuestionInfo,
    QuestionRequest,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolPending,
    ToolRunning,
)

MAX_PATCH = 256 * 1024
_RANK = {"pending": 0, "running": 1, "completed": 2, "error": 2}
# Told as the output, or of no meaning outside the machine that OpenCode runs on.
_UNTOLD_METADATA = frozenset({"output", "outputPath"})

Call = tuple[str, JsonObject]
"""A tool and its input."""


def interrupted(
    request: PermissionRequest | QuestionRequest, call: Call | None, directory: str | None
) -> Interrupted:
    """Return a request as the turn's interrupt, with what is known of the call that it is for."""
    if isinstance(request, QuestionRequest):
        questions = [_question(info) for info in request.questions]
        asked = Interrupted(request.id, "question", request.session_id, questions=questions)
    else:
        asked = Interrupted(
            request.id,
            "permission",
            request.session_id,
            request.permission,
            request.patterns,
            request.always,
            request.metadata,
        )
    tool, tool_input = call or (None, None)
    call_id = request.tool.call_id if request.tool else None
    return replace(asked, call_id=call_id, tool=tool, tool_input=tool_input, directory=directory)


def _question(info: QuestionInfo) -> Question:
    options = [QuestionOption(option.label, option.description) for option in info.options]
    return Question(info.question, info.header, options, info.multiple, info.custom)


def tool_changed(part: ToolPart) -> ToolChanged:
    state = part.state
    title = output = error = None
    match state:
        case ToolRunning(title=title, metadata={"output": str(output)}):
            pass
        case ToolRunning(title=title):
            pass
        case ToolCompleted(title=title, output=output):
            pass
        case ToolFailed(error=error):
            pass
        case ToolPending():
            pass
    shown = {k: v for k, v in (state.metadata or {}).items() if k not in _UNTOLD_METADATA}
    return ToolChanged(
        part.message_id,
        part.id,
        part.call_id,
        part.tool,
        state.status,
        title=title or None,
        input=None if state.status == "pending" else state.input,
        output=output,
        error=error,
        metadata=shown or None,
    )


def behind(new: ToolChanged, old: ToolChanged) -> bool:
    """Whether a state is an earlier one that a newer snapshot has overtaken."""
    if new.status != "running" or old.status != "running":
        return _RANK[new.status] < _RANK[old.status]
    shown, shown_before = new.output or "", old.output or ""
    return (
        (new.title is None and old.title is not None)
        or (new.metadata is None and old.metadata is not None)
        or (shown != shown_before and shown_before.startswith(shown))
    )


def usage(info: AssistantMessage) -> Usage:
    tokens = info.tokens
    return Usage(
        tokens.input,
        tokens.output,
        tokens.reasoning,
        tokens.cache.read,
        tokens.cache.write,
        info.cost,
    )


def diff(diffs: Sequence[FileDiff]) -> DiffChanged:
    files = [FileChange(d.file, d.status or "modified", d.additions, d.deletions) for d in diffs]
    patch = "\n".join(d.patch for d in diffs if d.patch)
    return DiffChanged(files, patch[:MAX_PATCH], truncated=len(patch) > MAX_PATCH)
