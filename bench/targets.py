"""The targets: ratios within one run, so that the machine cancels out.

``bench.report`` prints them, ``--check`` fails on one that is missed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.scenarios import Results, median

Value = Callable[[Results], float | None]
OURS = ("ours", "postgres", "other")


@dataclass(frozen=True, slots=True)
class Target:
    scenario: str
    text: str
    limit: float
    value: Value
    kind: str = "ratio"
    optional: bool = False
    """Whether there may be nothing to compare with."""

    def show(self, value: float) -> str:
        if self.kind == "ratio":
            return f"1/{1 / value:.0f}" if 0 < value < 0.5 else f"{value:.2f}"
        return f"{value:.3g} {self.kind}"


def of(scenario: str, system: str, key: str = "cpu", *, broken: bool = False) -> Value:
    """The median of a figure; nothing where the system was not measured, or failed.

    With ``broken``, a system that failed counts by what it did deliver.
    """

    def value(results: Results) -> float | None:
        samples = results.get(scenario, {}).get(system, [])
        usable = [s for s in samples if s.good or (broken and s.values.get("rate"))]
        return median(usable, key) if len(usable) == len(samples) else None

    return value


def ratio(above: Value, below: Value) -> Value:
    def value(results: Results) -> float | None:
        first, second = above(results), below(results)
        return None if first is None or not second else first / second

    return value


def against(scenario: str, other: str = "adapter", key: str = "cpu") -> Value:
    return ratio(of(scenario, "ours", key), of(scenario, other, key, broken=True))


def share(scenario: str) -> Value:
    """How many of the streams were complete, ordered and told once, in the worst round."""

    def value(results: Results) -> float | None:
        samples = results.get(scenario, {}).get("ours", [])
        missing = [1 - sample.complete / sample.asked for sample in samples]
        return max(missing) * 100 if missing else None

    return value


TARGETS = (
    Target(
        "stream-1", "CPU per delta, 1 stream, to the existing adapter", 1 / 12, against("stream-1")
    ),
    Target(
        "stream-32",
        "CPU per delta, 32 streams, to the existing adapter",
        1 / 50,
        against("stream-32"),
    ),
    Target(
        "stream-32",
        "CPU per delta, 32 streams, to the minimal relay",
        2,
        against("stream-32", "relay"),
    ),
    Target(
        "stream-128",
        "CPU per delta, 128 streams, to the minimal relay",
        2,
        against("stream-128", "relay"),
    ),
    Target(
        "long-20000",
        "CPU per delta, turn of 20,000 to turn of 200",
        1.2,
        ratio(of("long-20000", "ours"), of("long-200", "ours")),
    ),
    Target(
        "unary-1",
        "CPU per unary turn, 1 at once, to the existing adapter",
        1 / 20,
        against("unary-1"),
    ),
    Target(
        "unary-16",
        "CPU per unary turn, 16 at once, to the existing adapter",
        1 / 20,
        against("unary-16"),
    ),
    Target(
        "unary-64",
        "CPU per unary turn, 64 at once, to the existing adapter",
        1 / 20,
        against("unary-64"),
    ),
    *(
        Target(
            f"unary-{count}",
            f"CPU per unary turn, {count} at once, to the earlier commit",
            1,
            against(f"unary-{count}", "before"),
            optional=True,
        )
        for count in (1, 16, 64)
    ),
    Target("cold", "CPU of a cold start", 0.45, ratio(of("cold", "ours"), lambda _: 1e6), "s"),
    Target("cold", "memory after the start", 70, of("cold", "ours", "rss"), "MB"),
    Target(
        "idle",
        "CPU of 1,000 idle streams, after 12 s",
        2,
        of("idle", "ours", "idle_cpu"),
        "% of a core",
    ),
    Target(
        "stream-128",
        "latency added to a delta, 128 streams, p99",
        10,
        of("stream-128", "ours", "p99"),
        "ms",
    ),
    Target("stream-1000", "1,000 streams at once: not complete", 0, share("stream-1000"), "%"),
    Target("idle", "memory of an idle stream", 60, of("idle", "ours", "kilobytes"), "kB"),
    Target(
        "stream-32",
        "bytes written per delta, 32 streams, to the existing adapter",
        1 / 10,
        against("stream-32", key="written"),
    ),
    Target(
        "stream-32",
        "CPU per delta, 32 streams, PostgreSQL to SQLite",
        1.15,
        ratio(of("stream-32", "postgres"), of("stream-32", "ours")),
    ),
    Target(
        "stream-32",
        "CPU of PostgreSQL per delta, 32 streams, to the service's",
        0.25,
        ratio(of("stream-32", "postgres", "database"), of("stream-32", "postgres")),
    ),
    *(
        Target(
            f"other-{count}",
            f"delay of a delta on another replica, {count} streams, p99",
            limit,
            of(f"other-{count}", "other", "p99"),
            "ms",
        )
        for count, limit in ((32, 100), (128, 150))
    ),
    Target(
        "other-32",
        "CPU per delta, reading replica to the one that runs the turns",
        0.6,
        ratio(of("other-32", "other"), of("other-32", "other", "running")),
    ),
    Target("card", "CPU per card, to the existing adapter", 1 / 20, against("card")),
    Target("cold", "cold start, to the existing adapter", 1, against("cold", key="seconds")),
    Target(
        "list-10000",
        "CPU per page of 50 out of 10,000 tasks, to the existing adapter",
        1 / 10,
        against("list-10000"),
    ),
    Target(
        "list-100000",
        "CPU per page, 100,000 tasks to 100",
        2,
        ratio(of("list-100000", "ours"), of("list-100", "ours")),
    ),
)


def misses(results: Results) -> list[str]:
    """Every reason to fail a check: a target missed, or one that could not be compared although
    its scenario was run, or an answer of ours that was not whole.
    """
    found = [
        f"{target.text}: {target.show(value)}, at most {target.show(target.limit)}"
        for target in TARGETS
        if (value := target.value(results)) is not None and value > target.limit
    ]
    found += [
        f"{target.text}: nothing to compare with"
        for target in TARGETS
        if target.scenario in results and not target.optional and target.value(results) is None
    ]
    for scenario, systems in results.items():
        mine = [sample for name in OURS for sample in systems.get(name, [])]
        bad = [sample for sample in mine if not sample.good]
        found += [f"{scenario}: {s.complete} of {s.asked} complete, {s.faults}" for s in bad]
    return found
