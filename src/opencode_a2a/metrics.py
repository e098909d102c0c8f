"""The metrics that ``/metrics`` shows.

Each is declared here once and updated by the layer that it is about. Labels hold route templates,
states and outcomes, never an id or a name that a caller chose.
"""

import platform
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from opencode_a2a import __version__

disable_created_metrics()
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY)

BUILD_INFO = _gauge("a2a_build_info", "The versions that run; always 1.", ("version", "python"))
BUILD_INFO.labels(__version__, platform.python_version()).set(1)
REQUESTS = _counter("a2a_requests", "Requests answered.", ("method", "route", "status"))
REQUEST_SECONDS = _histogram(
    "a2a_request_duration_seconds",
    "Seconds until a request was answered; for a stream until it began.",
    ("route",),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600),
)
AUTH_REJECTED = _counter("a2a_auth_rejected", "Requests without a valid credential.")
OIDC_REFRESHES = _counter(
    "a2a_oidc_refreshes", "Fetches of the identity provider's keys, by outcome.", ("outcome",)
)
BUDGET_REJECTED = _counter(
    "a2a_budget_rejected", "Messages refused by a budget, by limit.", ("limit",)
)
RATE_LIMIT_REJECTED = _counter("a2a_rate_limit_rejected", "Requests over the rate limit.")
STREAM_REQUESTS = _counter("a2a_stream_requests", "Streams begun.")
STREAM_ACTIVE = _gauge("a2a_stream_active", "Streams open now.")
STREAM_ENDED = _counter("a2a_stream_ended", "Streams ended, by cause.", ("cause",))
STREAM_BUDGET_REJECTED = _counter("a2a_stream_budget_rejected", "Streams ended by a budget.")
UPSTREAM_RETRIES = _counter("opencode_stream_retries", "Reconnections to OpenCode's event stream.")
UPSTREAM_UP = _gauge("a2a_upstream_up", "Whether OpenCode can be reached.", ("upstream",))
UPSTREAM_RUNNING = _gauge("a2a_upstream_running", "Turns that run in OpenCode.", ("upstream",))
TASKS = _gauge("a2a_tasks", "Open tasks, by state.", ("state",))
WAITING_OLDEST = _gauge(
    "a2a_waiting_oldest_seconds",
    "Seconds for which the oldest task that waits for a person here has been waiting.",
)
FIRST_TEXT_SECONDS = _histogram(
    "a2a_first_text_seconds",
    "Seconds from taking a message to the first text of its answer; without tasks that had asked.",
    buckets=(0.25, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600),
)
TASKS_ENDED = _counter("a2a_tasks_ended", "Tasks ended, by outcome.", ("outcome",))
INTERRUPT_REQUESTS = _counter("interrupt_requests", "Permissions and questions asked.", ("kind",))
INTERRUPT_RESOLVED = _counter(
    "interrupt_resolved", "Permissions and questions settled.", ("resolution",)
)
CANCEL_REQUESTS = _counter("a2a_cancel_requests", "Cancel requests.")
CANCEL_SECONDS = _histogram(
    "a2a_cancel_duration_seconds", "Seconds from a cancel request to its end.", ("abort_outcome",)
)

AUDIT_LOST = _counter("a2a_audit_lost", "Audit records that went to the log instead of the file.")
CERTIFICATE_DAYS = _gauge("a2a_certificate_days_left", "Days until the TLS certificate expires.")
CERTIFICATE_DAYS.set(float("nan"))  # without a certificate, so that no alert takes it for 0
OTEL_SPANS = _counter("a2a_otel_spans", "Spans of traces, by whether they were sent.", ("outcome",))
PUSH_ATTEMPTS = _counter(
    "a2a_push_attempts", "Notifications sent to webhooks, by outcome.", ("outcome",)
)
PUSH_ENDED = _counter(
    "a2a_push_ended",
    "Webhooks that have ended: done, stopped by their receiver, or failed.",
    ("outcome",),
)
PUSH_PENDING = _gauge(
    "a2a_push_pending", "Webhooks with a notification that was not delivered yet."
)
PUSH_OLDEST = _gauge(
    "a2a_push_oldest_seconds", "Seconds that the oldest undelivered notification has been waiting."
)
LISTEN_UP = _gauge("a2a_listen_up", "Whether notifications of other replicas arrive.")
TAIL_SECONDS = _histogram(
    "a2a_tail_seconds",
    "Seconds from an event in another replica until it was read here.",
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10),
)
TAIL_QUERIES = _counter(
    "a2a_tail_queries",
    "Queries for the logs of tasks that other replicas run, by cause.",
    ("cause",),
)
MAIL_SECONDS = _histogram(
    "a2a_post_seconds",
    "Seconds until another replica answered a forwarded call, by outcome.",
    ("outcome",),
)
MAIL_OLDEST = _gauge(
    "a2a_post_oldest_seconds",
    "Seconds that the oldest call forwarded to another replica has been waiting for its answer.",
)
STORE_COMMIT_SECONDS = _histogram(
    "a2a_store_commit_seconds",
    "Seconds that a transaction took, including failed attempts.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
STORE_GROUP_SIZE = _histogram(
    "a2a_store_group_size",
    "Writes that shared a transaction.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
)
STORE_COMMIT_AGE = _gauge(
    "a2a_store_commit_age_seconds", "Seconds since the last transaction was committed."
)
STORE_FAILURES = _counter(
    "a2a_store_failures", "Reads and writes that failed because the database was not available."
)
STORE_RECONNECTS = _counter("a2a_store_reconnects", "Write connections that replaced a broken one.")
STORE_COMMITS_RESOLVED = _counter(
    "a2a_store_commits_resolved",
    "Commits whose connection broke, by whether they had taken effect.",
    ("found",),
)
FENCED = _counter("a2a_fenced", "Times that this replica learned that it may no longer write.")
REPLICAS = _gauge("a2a_replicas", "Live replicas that use the database, including this one.")
REPLICAS.set(1)
UPSTREAMS_UNOWNED = _gauge(
    "a2a_upstreams_unowned", "OpenCodes in the database that no live replica runs."
)
UPSTREAM_OWNED = _gauge(
    "a2a_upstream_owned", "Whether this replica runs the turns of OpenCode.", ("upstream",)
)
TAKEOVERS = _counter(
    "a2a_takeovers",
    "OpenCodes that this replica took over, by cause: new, handed over, or its owner is gone.",
    ("cause",),
)
TAKEOVER_SECONDS = _histogram(
    "a2a_takeover_seconds",
    "Seconds from taking over an OpenCode until its open tasks continued.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30),
)

# A rise of what was not there before is not seen as one.
for _counted, _values in (
    (OIDC_REFRESHES, ("ok", "failed")),
    (OTEL_SPANS, ("sent", "failed")),
    (PUSH_ENDED, ("done", "stopped", "failed")),
    (TAKEOVERS, ("new", "handed over", "gone")),
):
    for _value in _values:
        _counted.labels(_value)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition() -> bytes:
    """Return all metrics in the Prometheus text format 0.0.4."""
    return generate_latest(REGISTRY)
