"""OpenCode's values as turn events, one by one and without any memory.

``opencode.reader`` decides what is emitted and when; here is only what it looks like.
"""

from dataclasses import replace

from opencode_a2a.events import (
    Interrupted,
    JsonObject,
    ToolChanged,
    Usage,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    PermissionRequest,
    QuestionRequest,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolPending,
    ToolRunning,
)

_RANK = {"pending": 0, "running": 1, "completed": 2, "error": 2}
# Shown as the output, or of no meaning outside the machine that OpenCode runs on.
_HIDDEN_METADATA = frozenset({"output", "outputPath"})

ToolCall = tuple[str, JsonObject]
"""A tool and its input."""


def interrupted(
    request: PermissionRequest | QuestionRequest, call: ToolCall | None, directory: str | None
) -> Interrupted:
    """Return a request as the turn's interrupt, with what is known of the call that it is for."""
    if isinstance(request, QuestionRequest):
        asked = Interrupted(request.id, "question", request.session_id, questions=request.questions)
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
    shown = {k: v for k, v in (state.metadata or {}).items() if k not in _HIDDEN_METADATA}
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


def overtaken(new: ToolChanged, known: ToolChanged) -> bool:
    """Whether a state is an earlier one that a newer snapshot has overtaken."""
    if new.status != "running" or known.status != "running":
        return _RANK[new.status] < _RANK[known.status]
    output, known_output = new.output or "", known.output or ""
    return (
        (new.title is None and known.title is not None)
        or (new.metadata is None and known.metadata is not None)
        or (new.output is None and known.output is not None)  # a command begins with an empty one
        or (output != known_output and known_output.startswith(output))
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
