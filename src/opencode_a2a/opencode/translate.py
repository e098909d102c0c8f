"""Translates single OpenCode values into turn events, without any state.

``opencode.reader`` decides which events are emitted, and when.
"""

from collections.abc import Sequence
from dataclasses import replace

from opencode_a2a.events import (
    DiffChanged,
    FileChange,
    Interrupted,
    JsonObject,
    ToolChanged,
    Usage,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    FileDiff,
    PermissionRequest,
    QuestionRequest,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolPending,
    ToolRunning,
)

_RANK = {"pending": 0, "running": 1, "completed": 2, "error": 2}
_HIDDEN_METADATA = frozenset({"output", "outputPath"})
"""Shown as the output of the call, or meaningless outside the machine that OpenCode runs on."""
MAX_PATCH = 256 * 1024
"""Characters of a diff that are emitted."""

ToolCall = tuple[str, JsonObject]
"""A tool and its input."""


def interrupted(
    request: PermissionRequest | QuestionRequest,
    call: ToolCall | None,
    directory: str | None,
    sub_agent: str | None = None,
) -> Interrupted:
    """Return the interrupt for a request.

    ``call`` is the tool call that it is for, if known; ``sub_agent`` is the title of the sub-agent
    that asks.
    """
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
    return replace(
        asked,
        call_id=call_id,
        tool=tool,
        tool_input=tool_input,
        directory=directory,
        origin=sub_agent,
    )


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


def is_outdated(new: ToolChanged, known: ToolChanged) -> bool:
    """Whether the ``new`` state of a call is older than the one that a snapshot had already."""
    if new.status != "running" or known.status != "running":
        return _RANK[new.status] < _RANK[known.status]
    output, known_output = new.output or "", known.output or ""
    return (
        (new.title is None and known.title is not None)
        or (new.metadata is None and known.metadata is not None)
        or (new.output is None and known.output is not None)  # a command begins with an empty one
        or (output != known_output and known_output.startswith(output))
    )


def diff_changed(diffs: Sequence[FileDiff]) -> DiffChanged:
    files: dict[str, FileChange] = {}
    for diff in diffs:  # several prompts may have changed the same file
        known = files.get(diff.file, FileChange(diff.file, diff.status or "modified"))
        more, fewer = known.additions + diff.additions, known.deletions + diff.deletions
        files[diff.file] = replace(known, additions=more, deletions=fewer)
    patch = "\n".join(diff.patch for diff in diffs if diff.patch)
    return DiffChanged([*files.values()], patch[:MAX_PATCH], truncated=len(patch) > MAX_PATCH)


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
