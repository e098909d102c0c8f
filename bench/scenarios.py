"""What is measured, on which systems, and how often.

A scenario starts its systems afresh, lets each do a little first, and then takes them in turn
for some rounds, so that a slow minute of the machine falls on all of them. ``bench.report`` reads
the samples. A system that fails in a scenario is not tried again in it, nor in a larger one.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from bench import fill
from bench.load import Job
from bench.script import Script
from bench.systems import CARD, SYSTEMS, TOKEN, Figures, Running, environment

SLOW = ("adapter", "sdk")
STORING = ("ours", "adapter", "sdk")
SERVERS = ("ours", "before", "adapter", "sdk", "relay")
LIST = "/tasks?pageSize=50"
BUDGET_SECONDS = 1200.0
"""A full run that is later than this does one round of what is left."""
WARM_TURNS = 4
SETTLE_SECONDS = 12.0
"""How long streams are open before they count as idle: each turn that has been quiet for 5 s is
compared once with what OpenCode has stored."""
HOLD_SECONDS = 8.0


@dataclass(slots=True)
class Sample:
    """One measurement of one system; ``cpu`` is microseconds of the process tree per unit."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    asked: int = 0
    complete: int = 0
    faults: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def good(self) -> bool:
        return self.complete == self.asked > 0 and not self.faults


Results = dict[str, dict[str, list[Sample]]]
"""Scenario, system, samples."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    job: Job
    systems: tuple[str, ...]
    unit: str = "delta"
    rounds: int = 3
    slow_rounds: int = 2
    slow_timeout: float = 60.0
    after: str = ""
    """A smaller scenario: who failed there is not tried here."""

    def bound(self, system: str) -> float:
        return self.slow_timeout if system in SLOW else self.job.timeout


class Bench:
    """Runs scenarios and keeps their samples."""

    def __init__(self, systems: tuple[str, ...]) -> None:
        self.systems = systems
        self.started = time.monotonic()
        self.results: Results = {}

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > BUDGET_SECONDS

    def add(self, scenario: str, system: str, sample: Sample) -> None:
        self.results.setdefault(scenario, {}).setdefault(system, []).append(sample)
        shown = " ".join(f"{key}={value:.4g}" for key, value in sample.values.items())
        fault = "" if sample.good else f"  FAILED {sample.complete}/{sample.asked} {sample.faults}"
        print(f"  {scenario:18} {system:8} {shown}{fault}", flush=True)

    def failed(self, scenario: str, system: str) -> bool:
        return any(not sample.good for sample in self.results.get(scenario, {}).get(system, []))

    def run(self, scenario: Scenario) -> None:
        names = [
            name
            for name in scenario.systems
            if name in self.systems and not self.failed(scenario.after, name)
        ]
        with ExitStack() as stack:
            running = {name: stack.enter_context(Running(SYSTEMS[name])) for name in names}
            for name in names:
                warm_up(running[name])
            for number in range(scenario.rounds):
                for name in names:
                    enough = number >= (scenario.slow_rounds if name in SLOW else scenario.rounds)
                    if number and (enough or self.late or self.failed(scenario.name, name)):
                        continue
                    self.add(scenario.name, name, measure(running[name], scenario))
            for system in running.values():
                self.weigh(scenario, system)

    def weigh(self, scenario: Scenario, system: Running) -> None:
        """Add what a task takes in the database, once the server is stopped and its log folded."""
        samples = self.results[scenario.name][system.system.name]
        tasks = WARM_TURNS + sum(sample.complete for sample in samples)
        if system.system.database and scenario.unit == "delta":
            system.stop()
            size = fill.settled_size(system.state / system.system.database)
            samples[-1].values["stored"] = size / tasks

    def cold(self, rounds: int, systems: tuple[str, ...]) -> None:
        """From the start of the process to the first answered card."""
        names = [name for name in systems if name in self.systems]
        for name in names:
            with Running(SYSTEMS[name]):
                pass  # leaves its bytecode behind, as an installation has it
        for _ in range(rounds):
            for name in names:
                with Running(SYSTEMS[name]) as system:
                    used = system.figures()
                    values = {"seconds": system.start_seconds, "cpu": used.cpu * 1e6}
                    values["rss"] = used.resident / 1e6
                    self.add("cold", name, Sample(values, 1, 1))

    def idle(self, streams: int, systems: tuple[str, ...]) -> None:
        """Memory and CPU of streams on which nothing happens."""
        for name in (name for name in systems if name in self.systems):
            with Running(SYSTEMS[name]) as system:
                warm_up(system)
                self.add("idle", name, hold(system, streams))

    def stored(self, sizes: tuple[int, ...], systems: tuple[str, ...], seconds: float) -> None:
        """Reading one task, and a page of 50, out of many."""
        for name in (name for name in systems if name in self.systems):
            state = Path(tempfile.mkdtemp(prefix="bench-"))
            try:
                with Running(SYSTEMS[name], state) as system:
                    job = Job(0, "", "unary", streams=8, turns=13, timeout=60)
                    generate(system, job)
                for size in sizes:
                    fill.grow(state / str(SYSTEMS[name].database), name, size)
                    with Running(SYSTEMS[name], state) as system:
                        self.read(system, size, seconds)
            finally:
                shutil.rmtree(state, ignore_errors=True)

    def read(self, system: Running, size: int, seconds: float) -> None:
        request = urllib.request.Request(system.url(LIST), headers=AUTHORISED)  # noqa: S310  loopback
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310  loopback
            page = json.load(response)
        if int(page["totalSize"]) < size or len(page["tasks"]) != 50:
            raise RuntimeError(f"{system.system.label} does not see the {size} tasks stored for it")
        tasks = tuple(f"/tasks/{task['id']}" for task in page["tasks"])
        for kind, paths in (("list", (LIST,)), ("get", tasks)):
            job = Job(0, "", "get", "rest10", 4, seconds=seconds, paths=paths, timeout=30)
            scenario = Scenario(f"{kind}-{size}", job, (), "request", slow_timeout=30)
            self.add(scenario.name, system.system.name, measure(system, scenario))


AUTHORISED = {"authorization": f"Bearer {TOKEN}", "a2a-version": "1.0"}


def warm_up(system: Running) -> None:
    operation = "stream" if system.server else "direct"
    generate(
        system,
        Job(0, "", operation, streams=2, turns=WARM_TURNS // 2, script=Script(20, 1), timeout=20),
    )


def generate(system: Running, job: Job) -> dict[str, Any]:
    job = replace(job, port=system.port, token=TOKEN)
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=orjson.dumps(asdict(job)) + b"\n",
        stdout=subprocess.PIPE,
        env=environment(),
        check=True,
    )
    return orjson.loads(done.stdout)


def measure(system: Running, scenario: Scenario) -> Sample:
    job = replace(scenario.job, timeout=scenario.bound(system.system.name))
    if not system.server:
        job = replace(job, operation="direct")
    before, upstream = system.figures(), Figures.of(system.upstream.pid)
    beside = system.others()
    told = generate(system, job)
    time.sleep(0.3)  # what the server writes behind belongs to the work
    after = system.figures()
    units = told["deltas"] if scenario.unit == "delta" else told["complete"]
    values = {
        "cpu": (after.cpu - before.cpu) * 1e6 / max(units, 1),
        "rss": after.resident / 1e6,
        "written": (after.written - before.written) / max(units, 1),
        "wall": told["wall"],
        "rate": units / told["wall"],
        "upstream": (Figures.of(system.upstream.pid).cpu - upstream.cpu) * 1e6 / max(units, 1),
        "client": told["cpu"] * 1e6 / max(units, 1),
    }
    for name, used in system.others().items():
        values[name] = (used.cpu - beside[name].cpu) * 1e6 / max(units, 1)
    if told["p50"] is not None and job.operation != "unary":
        values |= {"p50": told["p50"], "p99": told["p99"]}
    if not system.server:
        del values["cpu"], values["rss"], values["written"]
    return Sample(values, told["asked"], told["complete"], told["faults"])


def hold(system: Running, streams: int) -> Sample:
    job = Job(system.port, TOKEN, "hold", streams=streams, script=Script(2, 600_000), timeout=60)
    before = system.figures()
    client = subprocess.Popen(
        [sys.executable, "-m", "bench.load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    if client.stdin is None or client.stdout is None:
        raise RuntimeError("the load generator has no pipes")
    client.stdin.write(orjson.dumps(asdict(job)) + b"\n")
    client.stdin.flush()
    held = int(client.stdout.readline())
    opened = system.figures()
    time.sleep(SETTLE_SECONDS)
    settled = system.figures()
    time.sleep(HOLD_SECONDS)
    after = system.figures()
    client.communicate()
    values = {
        "held": float(held),
        "kilobytes": (after.resident - before.resident) / 1e3 / max(held, 1),
        "opened_cpu": (settled.cpu - opened.cpu) / SETTLE_SECONDS * 100,
        "idle_cpu": (after.cpu - settled.cpu) / HOLD_SECONDS * 100,
    }
    faults = {} if held == streams else {"not served": streams - held}
    return Sample(values, streams, held, faults)


def median(samples: list[Sample], key: str) -> float | None:
    values = [sample.values[key] for sample in samples if key in sample.values]
    return statistics.median(values) if values else None


def streams(count: int, deltas: int, interval: float, **more: Any) -> Job:
    return Job(0, "", "stream", streams=count, script=Script(deltas, interval), **more)


def full() -> Iterator[Callable[[Bench], None]]:
    """All scenarios of the full run, in order."""
    yield lambda bench: bench.cold(5, SERVERS)
    card = Job(0, "", "get", "rest10", 4, seconds=1.5, paths=(CARD,))
    yield lambda bench: bench.run(Scenario("card", card, SERVERS, "request", slow_rounds=3))
    for count in (1, 16, 64):
        job = Job(0, "", "unary", streams=count, seconds=2, timeout=30)
        yield _plan(Scenario(f"unary-{count}", job, SERVERS, "turn", slow_timeout=30))
    yield from _streams()
    for deltas, turns in ((200, 10), (2_000, 1), (20_000, 1)):
        job = streams(1, deltas, 0.5, turns=turns)
        after = "" if deltas == 200 else "long-2000"
        yield _plan(Scenario(f"long-{deltas}", job, SERVERS, slow_timeout=45, after=after))
    for turns in (1, 10, 100):
        job = Job(0, "", "unary", turns=100, context_turns=turns)
        yield _plan(Scenario(f"context-{turns}", job, STORING, "turn", 2, 1))
    for readers in (1, 10, 100):
        job = Job(0, "", "readers", turns=readers, script=Script(200, 20))
        yield _plan(Scenario(f"readers-{readers}", job, STORING, rounds=2, slow_rounds=1))
    job = Job(0, "", "resume", streams=32, script=Script(200, 20))
    yield _plan(Scenario("resume", job, STORING, rounds=2, slow_rounds=1))
    for dialect in ("rest10", "rpc03", "rest03"):
        job = streams(32, 200, 20, dialect=dialect)
        systems = STORING if dialect == "rest10" else ("ours", "sdk")
        yield _plan(Scenario(f"line-{dialect}", job, systems, rounds=2, slow_rounds=1))
    yield lambda bench: bench.idle(1000, SERVERS)
    yield lambda bench: bench.stored((100, 10_000, 100_000), STORING, 1.5)


def _streams() -> Iterator[Callable[[Bench], None]]:
    everyone = (*SERVERS, "direct")
    yield _plan(Scenario("stream-1", streams(1, 200, 5, turns=5), everyone))
    yield _plan(Scenario("stream-32", streams(32, 200, 20), (*everyone, "postgres")))
    for count in (32, 128):
        yield _plan(Scenario(f"other-{count}", streams(count, 200, 20), ("other",)))
    after = "stream-32"
    for count, interval, rounds in ((128, 20, 3), (512, 50, 2), (1000, 100, 2)):
        name = f"stream-{count}"
        job = streams(count, 200, interval)
        yield _plan(Scenario(name, job, everyone, "delta", rounds, 1, 30, after))
        after = name


def quick() -> Iterator[Callable[[Bench], None]]:
    """The scenarios that have a target, small enough for two minutes."""
    fast = ("ours", "relay")
    pair = ("ours", "adapter")
    three = ("ours", "adapter", "relay")
    yield lambda bench: bench.cold(2, three)
    card = Job(0, "", "get", "rest10", 4, seconds=0.5, paths=(CARD,))
    yield _plan(Scenario("card", card, pair, "request", 2))
    unary = Job(0, "", "unary", streams=16, seconds=1, timeout=15)
    yield _plan(Scenario("unary-16", unary, ("before", *pair), "turn", 2))
    yield _plan(
        Scenario(
            "stream-1",
            streams(1, 200, 5, turns=2),
            ("ours", "adapter", "relay"),
            rounds=2,
            slow_rounds=1,
        )
    )
    # Half as long as the turns of the full run: the cost of a turn by itself weighs twice as much.
    # The existing adapter does not finish it in any time; what it delivers is enough to compare.
    short = Scenario("stream-32", streams(32, 100, 20), three, rounds=2, slow_rounds=1)
    yield _plan(replace(short, slow_timeout=10, systems=(*three, "postgres")))
    # As long as in the full run: two processes have to do with each turn.
    yield _plan(Scenario("other-32", streams(32, 200, 20), ("other",), rounds=3))
    yield _plan(Scenario("stream-128", streams(128, 100, 20), fast, rounds=2))
    yield _plan(Scenario("long-200", streams(1, 200, 0.25, turns=10), ("ours",), rounds=2))
    yield _plan(Scenario("long-20000", streams(1, 20_000, 0.25), ("ours",), rounds=1))
    yield lambda bench: bench.idle(1000, ("ours",))
    yield lambda bench: bench.stored((10_000,), ("adapter",), 0.7)
    yield lambda bench: bench.stored((100, 10_000, 100_000), ("ours",), 0.7)


def _plan(scenario: Scenario) -> Callable[[Bench], None]:
    return lambda bench: bench.run(scenario)
