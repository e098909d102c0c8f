"""What OpenCode's error answers mean.

``opencode.client`` asks here for every answer that is no success. Three dialects of error
bodies come in, one of this program's errors goes out; what OpenCode said is kept as its
``detail``, short and without paths, and without the provider's bodies and headers.
"""

import re
from typing import Final

from pydantic import Field, ValidationError

from opencode_a2a.errors import (
    SessionBusyError,
    SessionNotFoundError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
)
from opencode_a2a.opencode.types import Wire

MAX_DETAIL_CHARS: Final = 512


class _Issue(Wire):
    path: tuple[str | int, ...] = ()
    message: str = ""


class _RefusalData(Wire):
    message: str | None = None
    path: str | None = None
    issues: tuple[_Issue, ...] = ()


class _Refusal(Wire):
    """OpenCode's three ways to say no, in one."""

    data: _RefusalData = _RefusalData()
    message: str | None = None
    tag: str | None = Field(default=None, alias="_tag")
    name: str | None = None

    @property
    def text(self) -> str | None:
        if not self.data.issues:
            return self.data.message or self.message or self.tag or self.name
        source = (self.data.path or "configuration").rpartition("/")[2]
        issues = (
            f"{'.'.join(str(step) for step in issue.path)}: {issue.message}"
            for issue in self.data.issues
        )
        return f"{source}: {'; '.join(issues)}"


def refusal(path: str, status: int, body: bytes) -> UpstreamError | SessionNotFoundError:
    """Return the error for an answer that is no success."""
    detail = refusal_text(body)
    if status == 404:
        session_id = _session_of(path)
        if session_id is not None and not detail.startswith("Message not found"):
            return SessionNotFoundError(session_id=session_id)
        return UpstreamNotFoundError(upstream_status=status, detail=detail)
    if status == 409:
        return SessionBusyError(upstream_status=status, detail=detail)
    message = None
    if status in (401, 403):
        message = (
            "OpenCode refuses the credentials; "
            "check OPENCODE_AUTH_USERNAME and OPENCODE_AUTH_PASSWORD"
        )
    return UpstreamHttpError(message, upstream_status=status, detail=detail)


def _session_of(path: str) -> str | None:
    start, _, rest = path.removeprefix("/").partition("/")
    return rest.partition("/")[0] if start == "session" and rest.startswith("ses_") else None


def refusal_text(body: bytes) -> str:
    """Return OpenCode's own words for an error: short, and without paths."""
    try:
        text = _Refusal.model_validate_json(body).text or ""
    except ValidationError:
        text = body[: 4 * MAX_DETAIL_CHARS].decode(errors="replace")
    return mask_paths(text.strip())[:MAX_DETAIL_CHARS]


_PATHS_IN_QUOTES: Final = re.compile(
    r"""(["'`])(?:file://|/(?!/)|[A-Za-z]:[\\/]|\\\\)[^"'`\n]*\1""", re.IGNORECASE
)
_PATHS_IN_TEXT: Final = re.compile(
    r"""(?<![\w:/.\\])(?:file://|/(?=[\w.~-])|[A-Za-z]:[\\/](?!/)|\\\\)[^\s"'`<>|,;)\]}]*""",
    re.IGNORECASE,
)


def mask_paths(text: str) -> str:
    """Replace absolute paths of any system by ``<path>``; URLs stay."""
    return _PATHS_IN_TEXT.sub("<path>", _PATHS_IN_QUOTES.sub(r"\1<path>\1", text))
