"""Log records, and the trace of a request.

``app`` calls ``configure`` once; every layer takes its logger from ``structlog.get_logger``. A
record is one line with the ids of request and task from ``structlog.contextvars``, and without
secrets. ``web.edge`` begins a W3C trace, which is stored with the task that a message starts, and
``opencode``, ``peers`` and ``push.sender`` pass it on with ``trace_headers``. Nothing here knows
what is logged or traced; spans are made by ``otel``.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import orjson

# structlog imports rich if it is installed, which takes a tenth of a second of every start. Its
# tracebacks are not used here: they would show local variables, and with them secrets.
_UNUSED = "rich" not in sys.modules
if _UNUSED:
    sys.modules["rich"] = None  # type: ignore[assignment] # so an import of it fails
import structlog  # noqa: E402 - see above
from structlog.typing import FilteringBoundLogger, Processor  # noqa: E402

if _UNUSED:
    del sys.modules["rich"]

from opencode_a2a.printable import clean, escaped  # noqa: E402
from opencode_a2a.terminal import STATUS, Lines  # noqa: E402

if TYPE_CHECKING:
    from opencode_a2a.audit import AuditFile

MASK = "********"

_SECRET_KEY = re.compile(
    r"(?:^|_)(?:authorization|credentials?|passw(?:or)?ds?|secrets?|token|cookies?|api_?keys?)$"
)
"""Endings of names of secret values; ``max_tokens`` and ``token_count`` are not secret."""
_URL_USER = re.compile(r"(\w://[^\s/?#@:]*:)[^\s/?#]*@")
_URL_QUERY = re.compile(r"([?&](?:\w*(?:password|token|secret|key)|sig)=)[^&#\s]+", re.IGNORECASE)
_SCHEME = re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_LIMIT = 512
_drawn = bytearray()
"""Random bytes for the next ids."""


# --- secrets ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def secret_key(name: str) -> bool:
    """Whether a name is that of a secret, such as ``accessToken`` or ``X-Api-Key``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return _SECRET_KEY.search(words) is not None


def mask_url(url: str) -> str:
    """Mask the password before the host of a URL, and secrets in its query."""
    return _URL_QUERY.sub(rf"\1{MASK}", _URL_USER.sub(rf"\1{MASK}@", url))


def mask_text(text: str) -> str:
    """Mask the credentials that can be recognised in a text."""
    if "://" in text:
        text = mask_url(text)
    return _SCHEME.sub(rf"\1{MASK}", text)


def redact(value: object) -> object:
    """Return the value with everything secret masked, at any depth."""
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
"""Libraries that log every request, or repeat what the service logs itself."""


_unfiltered = partial(
    structlog.wrap_logger,
    None,
    wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    cache_logger_on_first_use=False,
)
"""Makes a logger that ignores the log level, unlike the configured one."""
OPERATOR: FilteringBoundLogger = _unfiltered()
"""For the start and the stop of the service, and for the bodies of requests and responses, which a
setting of their own switches on."""
AUDIT: FilteringBoundLogger = _unfiltered(audit=True)
"""For audit records, which are written at any log level."""
ROUTINE: FilteringBoundLogger = _unfiltered(audit=True, routine=True)
"""For frequent audit records: always in the audit file, but in the log only at INFO."""
_WORK = frozenset({"title", "what"})
"""Fields with words of a caller: shown at a terminal, but not written to a log file."""


def configure(
    level: str | None, stream: TextIO | None = None, audit: Path | None = None
) -> "AuditFile | None":
    """Write all log records of this level and above to the stream, as JSON unless it is a terminal.

    By default a terminal shows what happens to tasks (INFO, without requests), and a file gets
    warnings. Records of libraries that use ``logging`` take the same way. Audit records are written
    to the audit file as well, which is returned; the caller closes it.
    """
    output = stream or sys.stderr
    terminal = output.isatty()
    number = logging.getLevelNamesMapping()[level or ("INFO" if terminal else "WARNING")]
    render: Processor = Lines(everything=level is not None) if terminal else _json
    fit: list[Processor] = [_printable] if terminal else []
    STATUS.output = output if terminal and os.environ.get("TERM") != "dumb" else None

    def instead(line: str) -> None:
        print(line, file=output, flush=True)

    file = None
    if audit:
        from opencode_a2a.audit import AuditFile  # imports the metrics, which commands do not need

        file = AuditFile(audit, instead)
    shown = number <= logging.INFO

    def skip(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
        if "routine" in record and file is None and not shown:
            raise structlog.DropEvent
        return record

    def keep(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
        """Write audit records to the file; in the log, routine ones are ordinary records."""
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
    if terminal and level is None:
        handler.setLevel(logging.WARNING)  # of libraries and subprocesses, only warnings
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
    return file


def _json(_: object, __: str, record: Mapping[str, object]) -> str:
    record = {key: value for key, value in record.items() if key not in _WORK}
    return escaped(orjson.dumps(record, default=repr, option=orjson.OPT_NON_STR_KEYS).decode())


def _printable(_: object, __: str, record: MutableMapping[str, object]) -> Mapping[str, object]:
    """Escape characters that would control the terminal; tracebacks keep their lines."""
    whole = _WORK | {"exception"}  # ``Lines`` cuts and cleans these itself
    return {
        key: clean(value) if key in whole else value if value.isprintable() else repr(value)
        for key, value in record.items()
        if isinstance(value, str)
    } | {key: value for key, value in record.items() if not isinstance(value, str)}


# --- traces -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """A position in a W3C trace."""

    trace_id: str
    span_id: str | None = None
    """The span that called; None if the trace begins here."""
    flags: str = "00"
    state: str | None = None

    @property
    def traceparent(self) -> str:
        # A header has to name a span; one that nobody records is named after its trace.
        return f"00-{self.trace_id}-{self.span_id or self.trace_id[16:]}-{self.flags}"

    @property
    def stored(self) -> str:
        """The text that ``load`` reads."""
        return ",".join((self.trace_id, self.span_id or "", self.flags, self.state or ""))

    @classmethod
    def load(cls, stored: str | None) -> "Trace | None":
        if stored is None:
            return None
        trace_id, span_id, flags, state = stored.split(",", 3)
        return cls(trace_id, span_id or None, flags, state or None)


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


def begin_trace(traceparent: str | None, tracestate: str | None = None) -> Trace:
    """Continue the caller's trace, or begin one if there is none or it is malformed."""
    if found := _TRACEPARENT.fullmatch(traceparent or ""):
        version, trace_id, span_id, flags, more = found.groups()
        void = version == "ff" or (version == "00" and more)
        if not void and int(trace_id, 16) and int(span_id, 16):
            if tracestate and not (len(tracestate) <= _TRACESTATE_LIMIT and tracestate.isascii()):
                tracestate = None
            return Trace(trace_id, span_id, flags, tracestate)
    return Trace(draw_id(16))


def draw_id(size: int) -> str:
    """Return so many random bytes, which nobody can guess, in hexadecimal; only for the event loop.

    ``os.urandom``, and with it ``uuid4``, hands the interpreter to another thread, such as the
    writer of the database, and has to wait to get it back; so it is called for many ids at once.
    """
    if len(_drawn) < size:
        _drawn.extend(os.urandom(4096))
    drawn = _drawn[-size:].hex()
    del _drawn[-size:]
    return drawn


def trace_headers() -> dict[str, str]:
    """Return the headers that pass the current trace on to OpenCode, a peer or a webhook.

    They name the caller's span, unless ``otel`` records one of our own.
    """
    trace = current_trace.get()
    if trace is None:
        return {}
    headers = {"traceparent": trace.traceparent}
    if trace.state:
        headers["tracestate"] = trace.state
    return headers
