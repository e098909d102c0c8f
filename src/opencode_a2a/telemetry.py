"""Log records, the trace that a request belongs to, and the time of day that both carry.

``app`` calls ``configure`` once; every layer takes its logger from ``structlog.get_logger``. A
record is one line, with the ids of the request and task from ``structlog.contextvars``, and
without secrets. ``web.observe`` begins a W3C trace, and ``opencode`` hands it on with
``trace_headers``. Nothing here knows what is being logged or traced.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import orjson

# structlog imports rich where it finds it, for tracebacks that are not used here: they would show
# local variables, and with them secrets. That takes a tenth of a second of every start.
_UNUSED = "rich" not in sys.modules
if _UNUSED:
    sys.modules["rich"] = None  # type: ignore[assignment] # so an import of it fails
import structlog  # noqa: E402 - see above
from structlog.typing import FilteringBoundLogger, Processor  # noqa: E402

if _UNUSED:
    del sys.modules["rich"]

from opencode_a2a.printable import clean, escaped  # noqa: E402
from opencode_a2a.terminal import Lines  # noqa: E402

if TYPE_CHECKING:
    from opencode_a2a.audit import AuditFile

MASK = "********"

_SECRET_KEY = re.compile(
    r"(?:^|_)(?:authorization|credentials?|passw(?:or)?ds?|secrets?|token|cookies?|api_?keys?)$"
)
"""Ends of names whose value is a secret; ``max_tokens`` and ``token_count`` are figures."""
_URL_USER = re.compile(r"(\w://[^\s/?#@]*:)[^\s/?#]*@")
_URL_QUERY = re.compile(r"([?&](?:\w*(?:password|token|secret|key)|sig)=)[^&#\s]+", re.IGNORECASE)
_SCHEME = re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_LIMIT = 512


def now_ms() -> int:
    """Milliseconds since the epoch, for what people and other programs read.

    Decisions about time (deadlines, silence, back-off) use the monotonic clock of the event loop.
    """
    ahead = SHARED_CLOCK.ahead
    return time.time_ns() // 1_000_000 if ahead is None else SHARED_CLOCK.now(ahead)


class SharedClock:
    """The time of a database that several processes use, so that their times agree.

    Between two questions it goes on by the monotonic clock of this machine, whose time of day
    plays no part. It is asked in one thread, and read in others.
    """

    FOLLOWED_MS = 10_000
    """A clock that is set back by more is followed at once: standing still until the time comes
    again would hold up whatever is due."""

    def __init__(self) -> None:
        self.ahead: int | None = None
        """Milliseconds from the monotonic clock to the time of day; None: that of this machine."""
        self._latest = 0

    def now(self, ahead: int) -> int:
        """Return the time, which does not go back when it is corrected."""
        now = time.monotonic_ns() // 1_000_000 + ahead
        if now < self._latest < now + self.FOLLOWED_MS:
            return self._latest
        self._latest = now
        return now

    def follow(self, told: int, asked: int) -> None:
        """Take the time that a database told, which was asked at ``asked`` (monotonic, in ns).

        It was read some time between question and answer. A time that fits is not touched, so that
        it does not jump with every answer that takes longer.
        """
        answered = time.monotonic_ns() // 1_000_000
        taken = answered - asked // 1_000_000
        ahead = self.ahead if self.ahead is not None else told - answered
        self.ahead = min(max(ahead, told - answered), told + taken - answered)

    def reset(self) -> None:
        """Go by the time of this machine again."""
        self.ahead, self._latest = None, 0


SHARED_CLOCK = SharedClock()


# --- secrets ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def secret_key(name: str) -> bool:
    """Whether a value under this name is to be hidden: ``accessToken``, ``X-Api-Key``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return _SECRET_KEY.search(words) is not None


def mask_url(url: str) -> str:
    """Return a URL without the password in front of its host and without secrets in its query."""
    return _URL_QUERY.sub(rf"\1{MASK}", _URL_USER.sub(rf"\1{MASK}@", url))


def mask_text(text: str) -> str:
    """Return a text without the credentials that can be recognised in it."""
    if "://" in text:
        text = mask_url(text)
    return _SCHEME.sub(rf"\1{MASK}", text)


def redact(value: object) -> object:
    """Return the value with everything secret masked, however deep."""
    match value:
        case str():
            return mask_text(value)
        case dict():
            items = cast("Mapping[object, object]", value).items()
            return {k: MASK if secret_key(str(k)) else redact(v) for k, v in items}
        case list() | tuple():
            return [redact(item) for item in cast("list[object]", value)]
        case _:
            return value


def _redact_record(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
    return {
        key: MASK if value is not None and secret_key(key) else redact(value)
        for key, value in record.items()
    }


# --- records ----------------------------------------------------------------------------------

CHATTY = ("httpx2", "httpcore2", "uvicorn")
"""Libraries that log every request, or repeat what the service already logs."""

_ALWAYS = structlog.make_filtering_bound_logger(logging.INFO)
"""Unlike the logger of the configuration, it does not look at the log level."""
PAYLOADS: FilteringBoundLogger = structlog.wrap_logger(
    None, wrapper_class=_ALWAYS, cache_logger_on_first_use=False
)
"""What was said. The operator asks for these records by a setting of their own."""
AUDIT: FilteringBoundLogger = structlog.wrap_logger(
    None, wrapper_class=_ALWAYS, cache_logger_on_first_use=False, audit=True
)
"""Who did what. Every audit record is written through this logger, whatever the log level is."""
ROUTINE: FilteringBoundLogger = structlog.wrap_logger(
    None, wrapper_class=_ALWAYS, cache_logger_on_first_use=False, audit=True, routine=True
)
"""What happens all the time: always in the audit file, but in the log only at INFO."""
OPERATOR: FilteringBoundLogger = structlog.wrap_logger(
    None, wrapper_class=_ALWAYS, cache_logger_on_first_use=False
)
"""That the service has started, what it is, and that it stops: told whatever the log level is."""
_WORK = frozenset({"title", "what"})
"""What people see at the terminal, but what is no business of a log file: words of a caller."""


def configure(
    level: str | None, stream: TextIO | None = None, audit: Path | None = None
) -> "AuditFile | None":
    """Send all log records of this level and above to the stream: JSON unless it is a terminal.

    By default a terminal has what happens to tasks (INFO, without the requests), a file warnings.
    Records of libraries that use ``logging`` take the same way. Audit records go to the audit file
    as well, which is returned; its owner closes it.
    """
    output = stream or sys.stderr
    watched = output.isatty()
    number = logging.getLevelNamesMapping()[level or ("INFO" if watched else "WARNING")]
    render: Processor = Lines(everything=level is not None) if watched else _json
    fit: list[Processor] = [_printable] if watched else []

    def instead(line: str) -> None:
        print(line, file=output, flush=True)

    file = _open_audit(audit, instead) if audit else None
    shown = number <= logging.INFO

    def skip(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
        if "routine" in record and file is None and not shown:
            raise structlog.DropEvent
        return record

    def keep(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
        """Put audit records into the file; those of routine are no audit records of the log."""
        routine = bool(record.pop("routine", False))
        written = bool(record.get("audit")) and file is not None and file.take(_json(_, __, record))
        if routine:
            if not shown and written:
                raise structlog.DropEvent
            record.pop("audit", None)
        return record

    steps: list[Processor] = [
        skip,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_record,
        keep,
    ]
    structlog.configure(
        processors=[*steps, *fit, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *steps],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *fit, render],
        )
    )
    if watched and level is None:
        handler.setLevel(logging.WARNING)  # what libraries and processes tell besides
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
    return file


def _open_audit(path: Path, instead: Callable[[str], None]) -> "AuditFile":
    from opencode_a2a.audit import AuditFile  # loads the metrics, which commands do without

    return AuditFile(path, instead)


def _json(_: object, __: str, record: Mapping[str, object]) -> str:
    record = {key: value for key, value in record.items() if key not in _WORK}
    return escaped(orjson.dumps(record, default=repr, option=orjson.OPT_NON_STR_KEYS).decode())


def _printable(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
    """Escape what would do something to the terminal; tracebacks keep their lines."""
    whole = _WORK | {"exception"}  # what is cut and cleaned by who shows it
    return {
        key: clean(value) if key in whole else value if value.isprintable() else repr(value)
        for key, value in record.items()
        if isinstance(value, str)
    } | {key: value for key, value in record.items() if not isinstance(value, str)}


# --- traces -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """A position in a trace."""

    trace_id: str
    span_id: str
    flags: str = "00"
    state: str | None = None

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


def begin_trace(traceparent: str | None, tracestate: str | None = None) -> Trace:
    """Take up the caller's trace, or begin one when there is none or it is malformed."""
    if found := _TRACEPARENT.fullmatch(traceparent or ""):
        version, trace_id, span_id, flags, more = found.groups()
        void = version == "ff" or (version == "00" and more)
        if not void and int(trace_id, 16) and int(span_id, 16):
            if tracestate and not (len(tracestate) <= _TRACESTATE_LIMIT and tracestate.isascii()):
                tracestate = None
            return Trace(trace_id, span_id, flags, tracestate)
    fresh = os.urandom(24).hex()
    return Trace(fresh[:32], fresh[32:])


def trace_headers() -> dict[str, str]:
    """Return the headers that carry the current trace on to OpenCode or a peer."""
    trace = current_trace.get()
    if trace is None:
        return {}
    headers = {"traceparent": Trace(trace.trace_id, os.urandom(8).hex(), trace.flags).traceparent}
    if trace.state:
        headers["tracestate"] = trace.state
    return headers
