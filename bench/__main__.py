"""``python -m bench``: run the benchmark, print the table, write the page.

The full run writes ``docs/performance.md``; ``--quick`` only prints. ``--check`` exits with 1 when
a target is missed or an answer of ours is not whole. If ``BENCH_BEFORE`` names the program of an
earlier commit (``.venv/bin/opencode-a2a`` of its checkout), it is measured in turn with the others.
"""

import argparse
import os
import resource
import signal
import sys
import time
from dataclasses import asdict

import orjson

from bench import report, scenarios
from bench.scenarios import Bench, Results, Sample
from bench.systems import BEFORE, ROOT, SYSTEMS, deviations, install
from bench.targets import misses

KEPT = ROOT / "bench" / "results" / "latest.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--check", action="store_true", help="fail on a missed target")
    systems = [name for name in SYSTEMS if name != "before" or BEFORE in os.environ]
    parser.add_argument("--systems", default=",".join(systems), help="comma-separated")
    parser.add_argument("--report", action="store_true", help="write the page from the last run")
    return parser.parse_args()


def run(options: argparse.Namespace) -> tuple[Results, float]:
    load = os.getloadavg()[0]
    install()
    for note in deviations():
        print(f"note: {note}")
    bench = Bench(tuple(options.systems.split(",")))
    for scenario in scenarios.quick() if options.quick else scenarios.full():
        scenario(bench)
    return bench.results, load


def keep(results: Results, load: float) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    rows = {s: {n: [asdict(x) for x in xs] for n, xs in row.items()} for s, row in results.items()}
    KEPT.write_bytes(orjson.dumps({"load": load, "results": rows}))


def kept() -> tuple[Results, float]:
    value = orjson.loads(KEPT.read_bytes())
    rows = value["results"]
    return {
        s: {n: [Sample(**x) for x in xs] for n, xs in row.items()} for s, row in rows.items()
    }, value["load"]


def terminate(number: int, frame: object) -> None:
    """Leave in order, so that every process that was started is stopped."""
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    if options.report:
        report.write(*kept())
        return 0
    # A thousand streams are a thousand descriptors, in every process of the bench.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, terminate)
    started = time.monotonic()
    results, load = run(options)
    print(f"\n{report.table(results)}\n\n{report.targets(results)}\n")
    print(f"{time.monotonic() - started:.0f} s, load average before the run {load:.1f}")
    if not options.quick:
        keep(results, load)
        report.write(results, load)
    missed = misses(results)
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
