"""``docs/performance.md`` and its chart, from the samples of one run."""

import math
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench.scenarios import Results, Sample, median
from bench.systems import ROOT, SYSTEMS, deviations, installed
from bench.targets import TARGETS

PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "performance.svg"
PROFILE = ROOT / "bench" / "profile.md"
"""What a profiler says about the targets, written by hand."""
COLOURS = {"ours": "#0a7d4b", "adapter": "#c0392b", "sdk": "#b9770e", "relay": "#566573"}

ROWS: tuple[tuple[str, str, str, str, float], ...] = (
    *((f"stream-{n}", f"CPU per delta, {n} streams of 200", "cpu", "µs", 1)
      for n in (1, 32, 128, 512, 1000)),
    ("stream-32", "delay of a delta, 32 streams, p50", "p50", "ms", 1),
    *((f"stream-{n}", f"delay of a delta, {n} streams, p99", "p99", "ms", 1)
      for n in (1, 32, 128, 512, 1000)),
    ("stream-32", "CPU of PostgreSQL per delta, 32 streams", "database", "µs", 1),
    *((f"other-{n}", f"CPU per delta, {n} streams, read on another replica", "cpu", "µs", 1)
      for n in (32, 128)),
    *((f"other-{n}", f"CPU per delta of the replica that runs the {n}", "running", "µs", 1)
      for n in (32, 128)),
    *((f"other-{n}", f"delay of a delta on another replica, {n} streams, {p}", p, "ms", 1)
      for n in (32, 128) for p in ("p50", "p99")),
    ("stream-32", "written to disk per delta, 32 streams", "written", "B", 1),
    ("stream-32", "database per task of 200 deltas", "stored", "kB", 1e-3),
    *((f"stream-{n}", f"memory, {n} streams", "rss", "MB", 1) for n in (1, 128, 1000)),
    *((f"long-{n}", f"CPU per delta, a turn of {n:,}", "cpu", "µs", 1)
      for n in (200, 2_000, 20_000)),
    *((f"unary-{n}", f"CPU per unary turn, {n} at once", "cpu", "ms", 1e-3) for n in (1, 16, 64)),
    *((f"context-{n}", f"CPU per turn, {n} in a context", "cpu", "ms", 1e-3) for n in (1, 10, 100)),
    *((f"readers-{n}", f"CPU per delta and reader, {n} readers", "cpu", "µs", 1)
      for n in (1, 10, 100)),
    ("resume", "CPU per delta, 32 streams cut and resumed", "cpu", "µs", 1),
    ("line-rest10", "CPU per delta, 32 streams, 1.0 over HTTP+JSON", "cpu", "µs", 1),
    ("line-rpc03", "CPU per delta, 32 streams, 0.3 over JSON-RPC", "cpu", "µs", 1),
    ("line-rest03", "CPU per delta, 32 streams, 0.3 over HTTP+JSON", "cpu", "µs", 1),
    ("idle", "memory per idle stream, 1,000 of them", "kilobytes", "kB", 1),
    ("idle", "CPU of 1,000 streams, first 12 s", "opened_cpu", "% of a core", 1),
    ("idle", "CPU of 1,000 idle streams, next 8 s", "idle_cpu", "% of a core", 1),
    ("cold", "cold start to first card", "seconds", "s", 1),
    ("cold", "memory after start", "rss", "MB", 1),
    ("card", "CPU per card", "cpu", "µs", 1),
    *((f"get-{n}", f"CPU per task read, {n:,} stored", "cpu", "µs", 1)
      for n in (100, 10_000, 100_000)),
    *((f"list-{n}", f"CPU per page of 50, {n:,} stored", "cpu", "µs", 1)
      for n in (100, 10_000, 100_000)),
)  # fmt: skip


def number(value: float) -> str:
    if value and abs(value) < 100:
        return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"
    return f"{value:,.0f}"


def cell(samples: list[Sample], key: str, unit: str, scale: float) -> str:
    """Median and spread; a failure says so, since its figure means little."""
    if not samples:
        return ""
    bad = [sample for sample in samples if not sample.good]
    if bad:
        why = max(bad[0].faults, key=lambda fault: bad[0].faults[fault], default="")
        return f"failed: {bad[0].complete} of {bad[0].asked}" + (f", {why[:40]}" if why else "")
    values = [s.values[key] * scale for s in samples if key in s.values]
    middle = median(samples, key)
    if middle is None:
        return ""
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return f"{number(middle * scale)} {unit}{spread}"


def table(results: Results) -> str:
    systems = [name for name in SYSTEMS if any(name in row for row in results.values())]
    lines = ["| figure | " + " | ".join(SYSTEMS[name].label for name in systems) + " |"]
    lines.append("|---" * (len(systems) + 1) + "|")
    for scenario, title, key, unit, scale in ROWS:
        found = results.get(scenario, {})
        cells = [cell(found.get(name, []), key, unit, scale) for name in systems]
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(c.replace("|", "/") for c in cells) + " |")
    return "\n".join(lines)


def targets(results: Results) -> str:
    lines = ["| target | at most | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = target.value(results)
        shown = "not measured" if value is None else target.show(value)
        verdict = "" if value is None else "met" if value <= target.limit else "**missed**"
        lines.append(f"| {target.text} | {target.show(target.limit)} | {shown} | {verdict} |")
    return "\n".join(lines)


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in info if line.startswith("model name")), "CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}; load average before the run "
    )


def versions() -> str:
    mine = ("opencode-a2a", "a2a-sdk", "uvicorn", "uvloop", "httptools", "sqlalchemy")
    theirs = [
        line
        for line in installed("adapter")
        if line.startswith(("opencode-a2a", "a2a-sdk", "uvicorn"))
    ]
    ours = ", ".join(f"{name} {version(name)}" for name in mine)
    return f"Here: {ours}. Existing adapter: {', '.join(theirs)}. OpenCode recordings: 1.18.33."


def write(results: Results, load: float) -> None:
    CHART.write_text(chart(results))
    notes = "".join(f"- {note}\n" for note in deviations())
    PAGE.write_text(f"""# Performance

Generated by `make bench` on {datetime.now(UTC):%Y-%m-%d}; do not edit. Ratios within one run are
what counts: absolute figures are those of the machine.

- Machine: {machine()}{load:.1f}.
- Versions: {versions()}
{notes}
![CPU per streamed delta by number of streams](performance.svg)

## Targets

{targets(results)}

{PROFILE.read_text()}
## All figures

Median, with the lowest and highest round in brackets. CPU is that of the server's whole process
tree. Delay is the time from the upstream's write to the client's read. A cell that says "failed"
had answers that were refused, incomplete, out of order or doubled, or that did not end in time; a
system that failed at one size is not tried at the next, and is compared above by what it did
deliver. An empty cell was not measured.

{table(results)}

## How it is measured

- Every system has its own upstream: a synthetic OpenCode that replays a recorded turn for any
  number of sessions, and sends every event to every subscriber as the real one does. A unit test
  holds it to the recording.
- The client reads raw sockets. Each delta carries its number and the time it was sent, so the
  text itself tells what was lost, doubled or late.
- The systems take turns within each scenario. Rate limits, concurrency limits and stream budgets
  are lifted by configuration, for the existing adapter as for this project.
- With PostgreSQL the server runs on the same machine and writes to the disk. "On another replica"
  means two processes: one runs the upstream, and clients send to and read from the other.
- "Minimal relay" is the floor: no storage, no authentication, no validation. "Bare SDK" is the
  SDK's default handler with its SQLite store, reading the upstream like the relay.
- Stored tasks come from about a hundred turns through the API, whose rows are then copied with new
  ids, for every system alike (`bench/fill.py`).

Repeat it with `make bench` (about 25 minutes), or `make bench-quick` (under two minutes, checks the
targets that it measures).
""")


COUNTS = (1, 32, 128, 512, 1000)
LEFT, BOTTOM, RIGHT = 60, 310, 490


def chart(results: Results) -> str:
    """CPU per delta against streams at once, both logarithmic."""
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 350" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="640" height="350" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">CPU per streamed delta, by streams at once</text>',
    ]
    for micros, label in ((10, "10 µs"), (100, "100 µs"), (1000, "1 ms"), (10_000, "10 ms")):
        at = _y(micros)
        out.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>')
    out += [
        f'<text x="{_x(count)}" y="{BOTTOM + 18}" text-anchor="middle">{count}</text>'
        for count in COUNTS
    ]
    for name, colour in COLOURS.items():
        out += _line(results, name, colour)
    return "\n".join([*out, "</svg>\n"])


def _x(count: int) -> int:
    return round(LEFT + math.log10(count) / 3 * (RIGHT - LEFT))


def _y(micros: float) -> int:
    return round(BOTTOM - (math.log10(max(micros, 10)) - 1) / 3 * 270)


def _line(results: Results, name: str, colour: str) -> list[str]:
    """One system's points, joined; its line ends where it failed."""
    points: list[tuple[int, int]] = []
    for count in COUNTS:
        samples = results.get(f"stream-{count}", {}).get(name, [])
        micros = median(samples, "cpu")
        if micros is None or not all(sample.good for sample in samples):
            break
        points.append((_x(count), _y(micros)))
    if not points:
        return []
    path = " ".join(f"{x},{y}" for x, y in points)
    label = SYSTEMS[name].label + ("" if len(points) == len(COUNTS) else " (then fails)")
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points),
        f'<text x="{points[-1][0] + 8}" y="{points[-1][1] + 4}" fill="{colour}">{label}</text>',
    ]
