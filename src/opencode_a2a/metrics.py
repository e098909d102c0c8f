"""The metrics that ``/metrics`` shows.

Each is declared here once and updated by the layer that it is about. Labels hold route templates,
states and outcomes, never an id or a name that a caller chose.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "a2a_requests", "Requests answered.", ("method", "route", "status"), registry=REGISTRY
)
REQUEST_SECONDS = Histogram(
    "a2a_request_duration_seconds",
    "Seconds until a request was answered; for a stream until it began.",
    ("route",),
    registry=REGISTRY,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600),
)
AUTH_REJECTED = Counter(
    "a2a_auth_rejected", "Requests without a valid credential.", registry=REGISTRY
)
OIDC_REFRESHES = Counter(
    "a2a_oidc_refreshes",
    "Fetches of the identity provider's keys, by outcome.",
    ("outcome",),
    registry=REGISTRY,
)
BUDGET_REJECTED = Counter(
    "a2a_budget_rejected", "Messages refused by a budget, by limit.", ("limit",), registry=REGISTRY
)
RATE_LIMIT_REJECTED = Counter(
    "a2a_rate_limit_rejected", "Requests over the rate limit.", registry=REGISTRY
)
STREAM_REQUESTS = Counter("a2a_stream_requests", "Streams begun.", registry=REGISTRY)
STREAM_ACTIVE = Gauge("a2a_stream_active", "Streams open now.", registry=REGISTRY)
STREAM_ENDED = Counter(
    "a2a_stream_ended", "Streams ended, by cause.", ("cause",), registry=REGISTRY
)
STREAM_BUDGET_REJECTED = Counter(
    "a2a_stream_budget_rejected", "Streams ended by a budget.", registry=REGISTRY
)
UPSTREAM_RETRIES = Counter(
    "opencode_stream_retries", "Reconnections to OpenCode's event stream.", registry=REGISTRY
)
UPSTREAM_UP = Gauge(
    "a2a_upstream_up", "Whether OpenCode can be reached.", ("upstream",), registry=REGISTRY
)
UPSTREAM_RUNNING = Gauge(
    "a2a_upstream_running", "Turns that run in OpenCode.", ("upstream",), registry=REGISTRY
)
TASKS = Gauge("a2a_tasks", "Open tasks, by state.", ("state",), registry=REGISTRY)
TASKS_ENDED = Counter(
    "a2a_tasks_ended", "Tasks ended, by outcome.", ("outcome",), registry=REGISTRY
)
INTERRUPT_REQUESTS = Counter(
    "interrupt_requests", "Permissions and questions asked.", ("kind",), registry=REGISTRY
)
INTERRUPT_RESOLVED = Counter(
    "interrupt_resolved", "Permissions and questions settled.", ("resolution",), registry=REGISTRY
)
CANCEL_REQUESTS = Counter("a2a_cancel_requests", "Cancel requests.", registry=REGISTRY)
CANCEL_SECONDS = Histogram(
    "a2a_cancel_duration_seconds",
    "Seconds from a cancel request to its end.",
    ("abort_outcome",),
    registry=REGISTRY,
)

AUDIT_LOST = Counter(
    "a2a_audit_lost", "Audit records that went to the log instead of the file.", registry=REGISTRY
)
CERTIFICATE_DAYS = Gauge(
    "a2a_certificate_days_left", "Days until the TLS certificate expires.", registry=REGISTRY
)
CERTIFICATE_DAYS.set(float("nan"))  # without a certificate, so that no alert takes it for 0
PUSH_ATTEMPTS = Counter(
    "a2a_push_attempts",
    "Notifications sent to webhooks, by outcome.",
    ("outcome",),
    registry=REGISTRY,
)
PUSH_ENDED = Counter(
    "a2a_push_ended",
    "Webhooks that have ended: done, stopped by their receiver, or failed.",
    ("outcome",),
    registry=REGISTRY,
)
PUSH_PENDING = Gauge(
    "a2a_push_pending",
    "Webhooks with a notification that was not delivered yet.",
    registry=REGISTRY,
)
PUSH_OLDEST = Gauge(
    "a2a_push_oldest_seconds",
    "Seconds that the oldest undelivered notification has been waiting.",
    registry=REGISTRY,
)
LISTEN_UP = Gauge(
    "a2a_listen_up", "Whether notifications of other replicas arrive.", registry=REGISTRY
)
TAIL_SECONDS = Histogram(
    "a2a_tail_seconds",
    "Seconds from an event in another replica until it was read here.",
    registry=REGISTRY,
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10),
)
TAIL_QUERIES = Counter(
    "a2a_tail_queries",
    "Queries for the logs of tasks that other replicas run, by cause.",
    ("cause",),
    registry=REGISTRY,
)
POST_SECONDS = Histogram(
    "a2a_post_seconds",
    "Seconds until another replica answered a forwarded call, by outcome.",
    ("outcome",),
    registry=REGISTRY,
)
STORE_COMMIT_SECONDS = Histogram(
    "a2a_store_commit_seconds",
    "Seconds that a transaction took, including failed attempts.",
    registry=REGISTRY,
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
STORE_GROUP_SIZE = Histogram(
    "a2a_store_group_size",
    "Writes that shared a transaction.",
    registry=REGISTRY,
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
)
STORE_RECONNECTS = Counter(
    "a2a_store_reconnects", "Write connections that replaced a broken one.", registry=REGISTRY
)
STORE_COMMITS_RESOLVED = Counter(
    "a2a_store_commits_resolved",
    "Commits whose connection broke, by whether they had taken effect.",
    ("found",),
    registry=REGISTRY,
)
FENCED = Counter(
    "a2a_fenced", "Times that this replica learned that it may no longer write.", registry=REGISTRY
)
REPLICAS = Gauge(
    "a2a_replicas", "Live replicas that use the database, including this one.", registry=REGISTRY
)
REPLICAS.set(1)
UPSTREAM_OWNED = Gauge(
    "a2a_upstream_owned",
    "Whether this replica runs the turns of OpenCode.",
    ("upstream",),
    registry=REGISTRY,
)
TAKEOVERS = Counter(
    "a2a_takeovers",
    "OpenCodes that this replica took over, by cause: new, handed over, or its owner is gone.",
    ("cause",),
    registry=REGISTRY,
)
TAKEOVER_SECONDS = Histogram(
    "a2a_takeover_seconds",
    "Seconds from taking over an OpenCode until its open tasks continued.",
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30),
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition() -> bytes:
    """Return all metrics in the Prometheus text format 0.0.4."""
    return generate_latest(REGISTRY)
