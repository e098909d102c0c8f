"""Write deploy/monitoring/dashboard.json, for Grafana 11, from the list below: make docs.

With ``--check``, fail if the file is not up to date.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parent.parent / "deploy" / "monitoring" / "dashboard.json"
JOB = '{job=~"$job"}'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 7


class Panel(NamedTuple):
    """One panel: what it shows, in which unit, and its queries with their legends."""

    title: str
    unit: str
    queries: dict[str, str]


def quantiles(metric: str, *shares: float, by: str = "") -> dict[str, str]:
    """Return queries for the given shares of a histogram."""
    return {
        f"p{round(share * 100)}": f"histogram_quantile({share}, "
        f"sum by (le{by}) (rate({metric}_bucket{JOB}[$__rate_interval])))"
        for share in shares
    }


def rates(metric: str, by: str) -> dict[str, str]:
    """Return a query for the rate of a counter, by a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}{JOB}[$__rate_interval]))"}


PANELS = (
    Panel("Versions", "none", {"{{version}}": f"count by (version) (a2a_build_info{JOB})"}),
    Panel("Live replicas", "none", {"{{instance}}": f"a2a_replicas{JOB}"}),
    Panel("Open tasks by state", "none", {"{{state}}": f"sum by (state) (a2a_tasks{JOB})"}),
    Panel(
        "Longest wait for a person",
        "s",
        {"{{instance}}": f"a2a_waiting_oldest_seconds{JOB}"},
    ),
    Panel("Time to the first text", "s", quantiles("a2a_first_text_seconds", 0.5, 0.95)),
    Panel("Ended tasks by outcome", "ops", rates("a2a_tasks_ended_total", "outcome")),
    Panel("Permissions and questions asked", "ops", rates("interrupt_requests_total", "kind")),
    Panel(
        "Permissions and questions settled", "ops", rates("interrupt_resolved_total", "resolution")
    ),
    Panel("Requests by status", "reqps", rates("a2a_requests_total", "status")),
    Panel("Time to answer", "s", quantiles("a2a_request_duration_seconds", 0.5, 0.95, 0.99)),
    Panel(
        "Refused",
        "reqps",
        {
            name: f"sum(rate({metric}{JOB}[$__rate_interval]))"
            for name, metric in (
                ("credential", "a2a_auth_rejected_total"),
                ("rate limit", "a2a_rate_limit_rejected_total"),
                ("budget", "a2a_budget_rejected_total"),
                ("stream budget", "a2a_stream_budget_rejected_total"),
            )
        },
    ),
    Panel("Open streams", "none", {"{{instance}}": f"a2a_stream_active{JOB}"}),
    Panel("Ended streams by cause", "ops", rates("a2a_stream_ended_total", "cause")),
    Panel("Time to cancel", "s", quantiles("a2a_cancel_duration_seconds", 0.5, 0.99)),
    Panel(
        "OpenCodes that answer their owner",
        "none",
        {"{{upstream}}": f"max by (upstream) (a2a_upstream_up{JOB})"},
    ),
    Panel(
        "Owners of each OpenCode",
        "none",
        {"{{upstream}}": f"sum by (upstream) (a2a_upstream_owned{JOB})"},
    ),
    Panel(
        "OpenCodes without an owner",
        "none",
        {"{{instance}}": f"a2a_upstreams_unowned{JOB}"},
    ),
    Panel(
        "Turns that run",
        "none",
        {"{{upstream}}": f"sum by (upstream) (a2a_upstream_running{JOB})"},
    ),
    Panel("Commits", "s", quantiles("a2a_store_commit_seconds", 0.5, 0.99)),
    Panel("Since the last commit", "s", {"{{instance}}": f"a2a_store_commit_age_seconds{JOB}"}),
    Panel("Delay between replicas", "s", quantiles("a2a_tail_seconds", 0.5, 0.99)),
    Panel("Oldest forwarded call", "s", {"{{instance}}": f"a2a_post_oldest_seconds{JOB}"}),
    Panel("Take-overs by cause", "ops", rates("a2a_takeovers_total", "cause")),
    Panel("Webhooks by outcome of an attempt", "ops", rates("a2a_push_attempts_total", "outcome")),
    Panel("Oldest notification", "s", {"{{instance}}": f"a2a_push_oldest_seconds{JOB}"}),
    Panel(
        "Lost connections",
        "ops",
        {
            "OpenCode's events": f"sum(rate(opencode_stream_retries_total{JOB}[$__rate_interval]))",
            "database": f"sum(rate(a2a_store_reconnects_total{JOB}[$__rate_interval]))",
        },
    ),
    Panel("Memory", "bytes", {"{{instance}}": f"process_resident_memory_bytes{JOB}"}),
    Panel(
        "CPU",
        "percentunit",
        {"{{instance}}": f"rate(process_cpu_seconds_total{JOB}[$__rate_interval])"},
    ),
    Panel("Open files", "none", {"{{instance}}": f"process_open_fds{JOB}"}),
)


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": SOURCE,
            "gridPos": {
                "x": number % 3 * WIDTH,
                "y": number // 3 * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + place),
                    "datasource": SOURCE,
                    "expr": query,
                    "legendFormat": legend,
                }
                for place, (legend, query) in enumerate(panel.queries.items())
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "job",
            "type": "query",
            "label": "Job",
            "datasource": SOURCE,
            "query": "label_values(a2a_build_info, job)",
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
        },
    ]
    made: dict[str, Any] = {
        "title": "opencode-a2a",
        "uid": "opencode-a2a",
        "schemaVersion": 39,
        "tags": ["opencode-a2a"],
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(dashboard())
    elif not FILE.is_file() or FILE.read_text() != dashboard():
        sys.exit(f"{FILE.name} is not up to date; run `make docs`")
