"""Translates single OpenCode values into turn events, and the end of a turn into its outcome.

``opencode.reader`` decides which events are emitted, and when. Nothing here has a state.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import orjson
from pydantic import ValidationError

from opencode_a2a.events import (
    DiffChanged,
    Failure,
    FailureType,
    FileChange,
    Interrupted,
    Json,
    JsonObject,
    Outcome,
    ToolChanged,
    Usage,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    FileDiff,
    MessageWithParts,
    PermissionRequest,
    QuestionRequest,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolPending,
    ToolRunning,
    TurnError,
    WrittenTodos,
)
from opencode_a2a.rights import READING

_RANK = {"pending": 0, "running": 1, "completed": 2, "error": 2}
_HIDDEN_METADATA = frozenset({"output", "outputPath"})
"""Shown as the output of the call, or meaningless outside the machine that OpenCode runs on."""
MAX_PATCH = 256 * 1024
"""Characters of a diff that are emitted."""
MAX_TOOL_TEXT = 256 * 1024
"""Characters of the output or the error of a tool call that are emitted, and of each value in its
metadata as JSON. OpenCode (1.18) cuts the output itself, at 50 KB, but neither the error nor the
metadata, which for an edit includes a diff."""

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
            tells_reason=request.tells_reason,
        )
    tool, tool_input = call or (None, None)
    return replace(
        asked,
        call_id=request.tool.call_id if request.tool else None,
        call_message_id=request.tool.message_id if request.tool else None,
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
    shown: JsonObject = {}
    omitted: list[Json] = []
    for name, value in (state.metadata or {}).items():
        if name in _HIDDEN_METADATA:
            continue
        try:
            fits = len(orjson.dumps(value)) <= MAX_TOOL_TEXT
        except TypeError:  # nested too deeply, or a number too large, to be stored
            fits = False
        if fits:
            shown[name] = value
        else:
            omitted.append(name)
    if omitted:
        shown["omitted"] = omitted
    return ToolChanged(
        part.message_id,
        part.id,
        part.call_id,
        part.tool,
        state.status,
        title=title or None,
        input=None if state.status == "pending" else state.input,
        output=_cut(output),
        error=_cut(error),
        metadata=shown or None,
    )


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_TOOL_TEXT:
        return text
    return f"{text[:MAX_TOOL_TEXT]}\n[cut short by opencode-a2a: {len(text):,} characters in all]"


TODO_TOOL = "todowrite"


def todos_written(part: ToolPart) -> list[JsonObject] | None:
    """Return the todo list that a call of the tool ``todowrite`` has written, if it is one."""
    if part.tool != TODO_TOOL or not isinstance(part.state, ToolCompleted):
        return None
    try:
        written = WrittenTodos.model_validate(part.state.metadata)
    except ValidationError:
        return None
    return [todo.model_dump(exclude_none=True) for todo in written.todos]


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


# How a turn ended: an outcome, and for a failure a stable type and a remedy. A provider's own words
# are repeated only as one short line without URLs, paths and anything that looks like a secret.

MAX_WORDS = 300
"""Characters of a provider's own words that are repeated."""

INTERRUPTED = Failure(
    FailureType.UPSTREAM_INTERRUPTED,
    "OpenCode was interrupted before the answer was complete. Send the message again.",
)
FORGOTTEN = Failure(
    FailureType.UPSTREAM_INTERRUPTED,
    "OpenCode ended while it was waiting for an answer, and what it asked ended with it. "
    "Send the message again, and it asks again.",
)
LOST = Failure(
    FailureType.UPSTREAM_INTERRUPTED,
    "What the agent left running in the background was stopped together with OpenCode, and its "
    "result is lost. Send the message again.",
)
UNANSWERED = Failure(
    FailureType.UPSTREAM_INTERRUPTED,
    "OpenCode gave no answer: it was interrupted, or another prompt in the same session took "
    "its place. Send the message again.",
)
ABORTED = Failure(
    FailureType.UPSTREAM_ABORTED,
    "The turn was stopped inside OpenCode. Send the message again to continue.",
)
STOPPED_UNHEARD = Failure(
    FailureType.UPSTREAM_ABORTED,
    "The turn was stopped while this service was not connected to OpenCode: OpenCode was ended, or "
    "somebody stopped the turn there. Send the message again to continue.",
)
REFUSED = Failure(
    FailureType.UPSTREAM_REQUEST_REJECTED,
    "You refused what OpenCode asked for, so it stopped. "
    "Send another message to continue in a different way.",
)

_URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://\S+", re.IGNORECASE)
_SECRET = re.compile(r"\b(?:sk|pk|key|tok|ghp|xox\w)[-_][\w*.…-]{4,}|\b(?=\w*\d)[\w*-]{28,}")

_PATHS_IN_QUOTES = re.compile(
    r"""(["'`])(?:file://|/(?!/)|[A-Za-z]:[\\/]|\\\\)[^"'`\n]*\1""", re.IGNORECASE
)
_PATHS_IN_TEXT = re.compile(
    r"""(?<![\w:/.\\])(?:file://|/(?=[\w.~-])|[A-Za-z]:[\\/](?!/)|\\\\)[^\s"'`<>|,;)\]}]*""",
    re.IGNORECASE,
)

_STATUS = {
    400: (FailureType.UPSTREAM_BAD_REQUEST, "The model provider refused the request"),
    401: (
        FailureType.UPSTREAM_UNAUTHORIZED,
        "The model provider refused its credentials; sign in to it in OpenCode and try again",
    ),
    403: (
        FailureType.UPSTREAM_PERMISSION_DENIED,
        "The model provider denies access; check what its account may use",
    ),
    404: (
        FailureType.UPSTREAM_RESOURCE_NOT_FOUND,
        "The model provider does not know the model; choose another",
    ),
    429: (
        FailureType.UPSTREAM_QUOTA_EXCEEDED,
        "The model provider's limit is reached; wait, or raise the quota",
    ),
}
_NAMED = {
    "ContextOverflowError": (
        FailureType.UPSTREAM_CONTEXT_OVERFLOW,
        "The conversation no longer fits the model; start a new context or shorten the message",
    ),
    "ContentFilterError": (
        FailureType.UPSTREAM_CONTENT_FILTERED,
        "The model provider's content filter blocked the answer; rephrase the message",
    ),
    "MessageOutputLengthError": (
        FailureType.UPSTREAM_OUTPUT_LENGTH,
        "The answer was longer than the model may write; ask for less at once",
    ),
    "StructuredOutputError": (
        FailureType.UPSTREAM_STRUCTURED_OUTPUT,
        "The model did not answer in the form that was asked for; simplify the schema or try again",
    ),
}
REFUSALS = ("The user rejected permission", "The user dismissed this question")
"""The beginnings of a tool's error if it failed because a person refused it."""
FORBIDDEN = "The user has specified a rule which prevents you"
"""The beginning of a tool's error if it failed because a rule forbids it."""


def could_change_files(answers: Iterable[MessageWithParts]) -> bool:
    """Whether a tool ran that can change files.

    OpenCode's diff of a message compares the whole directory before and after. If no such tool ran,
    what differs is the work of somebody else there, and not for this caller to see.
    """
    tools = (part for answer in answers for part in answer.parts if isinstance(part, ToolPart))
    return any(
        tool.tool not in READING
        and not (
            isinstance(tool.state, ToolFailed)
            and tool.state.error.startswith((*REFUSALS, FORBIDDEN))
        )
        for tool in tools
    )


def judge(
    last: AssistantMessage | None,
    error: TurnError | None,
    *,
    refused: bool,
    forgotten: bool,
    unheard: bool,
    stepped: bool,
    retrying: bool,
    overtaken: bool,
) -> tuple[Outcome, Failure | None]:
    """Return the outcome of a turn that this service did not stop.

    ``last`` is its last message, ``error`` that of a ``session.error`` event. ``refused``: a person
    refused what the last message asked for. ``forgotten``: nobody can answer that any more, since
    another process of OpenCode took the place of the one that asked. ``unheard``: the last message
    ended before this process followed the turn of an earlier one. ``stepped``: a model was
    asked for that message, and its answers end with a reason, unlike a command that a person ran.
    ``retrying``: OpenCode was waiting for a provider when it stopped. ``overtaken``: a prompt of
    another turn came into the session.
    """
    if last is None or last.time.completed is None:
        error = (last and last.error) or error
        if error is not None:
            return _explain(error, last and last.provider_id)
        return Outcome.FAILED, FORGOTTEN if forgotten else INTERRUPTED if last else UNANSWERED
    if last.error is not None:
        outcome, failure = _explain(last.error, last.provider_id)
        return outcome, STOPPED_UNHEARD if failure is ABORTED and unheard else failure
    if last.finish is None and last.structured is None and (stepped or retrying):
        # OpenCode was stopped in the middle of a text: it stores what it has, without an error.
        return Outcome.FAILED, ABORTED if retrying else INTERRUPTED
    if last.finish not in ("tool-calls", "unknown") or last.structured is not None:
        return Outcome.COMPLETED, None
    if refused:
        return Outcome.REJECTED, REFUSED
    if overtaken:
        return Outcome.COMPLETED, None
    return Outcome.FAILED, FORGOTTEN if forgotten else INTERRUPTED


def mask_paths(text: str) -> str:
    """Replace absolute paths, of Unix or Windows, by ``<path>``; URLs stay."""
    return _PATHS_IN_TEXT.sub("<path>", _PATHS_IN_QUOTES.sub(r"\1<path>\1", text))


def redact(text: str) -> str:
    """Return the first line of a text from OpenCode without URLs, paths and secrets."""
    line = text.strip().partition("\n")[0]
    line = _SECRET.sub("…", mask_paths(_URL.sub("<url>", line)))
    return line if len(line) <= MAX_WORDS else line[:MAX_WORDS] + "…"


def _explain(error: TurnError, provider: str | None) -> tuple[Outcome, Failure]:
    """Return the outcome and the failure of a turn that ended with this error."""
    status = error.data.status_code
    if error.name == "MessageAbortedError":
        return Outcome.FAILED, ABORTED
    unsigned = error.name == "ProviderAuthError" or status == 401
    kind, remedy = _STATUS[401] if unsigned else _NAMED.get(error.name) or _by_status(status)
    if unsigned and provider:  # whoever reads it has to know where to sign in
        remedy = remedy.replace("The model provider", f"The model provider {redact(provider)}")
    text = redact(error.data.message or "")
    # The text of a database error, which comes when the session was deleted, helps no caller.
    words = f": {text}" if text and not text.startswith("Failed query") else "."
    outcome = Outcome.AUTH_REQUIRED if unsigned else Outcome.FAILED
    return outcome, Failure(kind, remedy + words, status)


def _by_status(status: int | None) -> tuple[str, str]:
    if status is None:
        return FailureType.UPSTREAM_EXECUTION_ERROR, "OpenCode could not run the turn"
    if status in _STATUS:
        return _STATUS[status]
    if 400 <= status < 500:
        text = f"The model provider refused the request ({status})"
        return FailureType.UPSTREAM_CLIENT_ERROR, text
    if status >= 500:
        text = f"The model provider failed ({status}); try again later"
        return FailureType.UPSTREAM_SERVER_ERROR, text
    return FailureType.UPSTREAM_HTTP_ERROR, f"The model provider answered unexpectedly ({status})"
