"""One chaos run: start the cluster, cause faults while clients work, and collect what they saw."""

import asyncio
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.chaos.clients import Client
from tests.chaos.cluster import LEASE_SECONDS, REPLICAS, Cluster
from tests.chaos.history import (
    CHECKER,
    MOST_SLOWNESS,
    TERMINAL,
    History,
    Unexpected,
    Violation,
    take_overs,
)

CLIENTS = 24
"""The clients, the relays and the lines share one process."""
SETTLE_SECONDS = 60.0
"""Seconds within which all tasks must end once no more faults are caused, on an idle machine."""
STANDBY_SECONDS = 120.0
"""Runs that last so long have a standby of the database, and a failover."""
REPLAYED = 400
"""Number of logs that are read from every replica at the end; the others are read from one."""
SHOWN_LINES = 120
"""Records shown of one task in a report; the file that `make chaos` writes has all of them."""
LONG_WORDS = 250
"""Words of a text that is written while all replicas are restarted."""
CONNECTIONS = 6
"""Connections of a busy replica to the database."""


async def campaign(
    seed: int, seconds: float, clients: int = CLIENTS, earlier: str | None = None
) -> History:
    """Run one, and return its history; ``earlier`` is the commit that one of the replicas runs."""
    rng, history = Random(seed), History(seed)  # noqa: S311 - a game
    with tempfile.TemporaryDirectory(prefix="opencode-a2a-chaos-") as place:
        standby = seconds >= STANDBY_SECONDS
        cluster = Cluster(history, Path(place), standby=standby, earlier=earlier)
        async with cluster.running(rng):
            callers = [
                Client(number, cluster, Random(rng.random()))  # noqa: S311 - a game
                for number in range(1, clients + 1)
            ]
            work = [asyncio.create_task(caller.run()) for caller in callers]
            await cluster.torment(Random(rng.random()), seconds, calm=seconds >= 60)  # noqa: S311
            for caller in callers:
                caller.stopping = True
            await cluster.all_up()
            since, late = time.time(), set(work)
            while late and time.time() < since + cluster.allowed(SETTLE_SECONDS, since):
                _, late = await asyncio.wait(work, timeout=1.0)
            for caller, task in zip(callers, work, strict=True):
                if task in late:
                    text = f"did not come to an end; {caller.doing}"
                    who = f"client {caller.number}"
                    history.unexpected.append(Unexpected(time.time(), who, text))
                    task.cancel()
            for done in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(done, Exception):
                    raise done
            await asyncio.to_thread(cluster.collect)
            await _replay(cluster, Client(CHECKER, cluster, rng))
            history.memory = [(one.name, one.memory, one.resident()) for one in cluster.replicas]
            history.connections = REPLICAS * CONNECTIONS, await cluster.connections()
    return history


async def restarts(seed: int, streams: int) -> History:
    """Restart one replica after the other, and kill one, while texts are written."""
    rng, history = Random(seed), History(seed)  # noqa: S311 - a game
    with tempfile.TemporaryDirectory(prefix="opencode-a2a-chaos-") as place:
        cluster = Cluster(history, Path(place))
        async with cluster.running(rng):
            callers = [
                Client(number, cluster, Random(rng.random()))  # noqa: S311 - a game
                for number in range(1, streams + 1)
            ]
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller.stream_long(LONG_WORDS))
                await asyncio.sleep(3)
                for replica in cluster.replicas:
                    await cluster.cause("term", replica)
                    await cluster.all_up()
                await asyncio.sleep(2 * LEASE_SECONDS)
                await cluster.cause("kill", cluster.replicas[0])
            await asyncio.to_thread(cluster.collect)
    return history


async def _replay(cluster: Cluster, client: Client) -> None:
    """Read the stored logs, some from every replica and the others from one."""
    history = cluster.history
    for place, task in enumerate(history.tasks):
        if task.state in TERMINAL:
            some = cluster.replicas if place < REPLAYED else [client.rng.choice(cluster.replicas)]
            for replica in some:
                history.logs[task.id] = await client.replay(task.id, replica)


def report(history: History, found: list[Violation]) -> str:
    """Summarize a run, with every violation and the history of an example task for each rule."""
    faults = Counter(fault.kind for fault in history.faults)
    states = Counter(task.state for task in history.tasks)
    again = sum(one.again for one in history.prompted)
    stood = {
        kind: [one.seconds for one in take_overs(history) if one.fault.kind == kind]
        for kind in ("kill", "term")
    }
    lines = [
        f"seed {history.seed}: {len(history.tasks)} tasks ({_counted(states)}), "
        f"{len(history.told)} events, {len(history.reads)} reads, {again} prompts repeated",
        f"faults: {_counted(faults)}; {len(history.registered)} starts of replicas, "
        f"{len(history.owned)} changes of an OpenCode's owner",
        *(f"tasks stood still after {kind}: {_longest(times)}" for kind, times in stood.items()),
        f"the machine was {history.slowness(0, math.inf):.1f} times slower than an idle one "
        f"(limits grow by at most {MOST_SLOWNESS:.0f})",
        f"{len(found)} violations",
    ]
    lines += [f"VIOLATION of {one.rule!r}: {one.text} [{one.task}]" for one in found]
    # One task for each rule: more of them rarely tell more.
    examples = dict.fromkeys(
        {one.rule: one.task for one in reversed(found) if one.task is not None}.values()
    )
    return "\n".join([*lines, *histories(history, list(examples), SHOWN_LINES)])


def _longest(seconds: list[float]) -> str:
    ranked = sorted(seconds)
    if not ranked:
        return "none"
    median, most = ranked[len(ranked) // 2], ranked[-1]
    return f"{len(ranked)}, for {median:.1f} s at the median and {most:.1f} s at most"


def histories(history: History, tasks: list[str], last: int = 0) -> Iterator[str]:
    """Yield the histories of tasks, or the last lines of each."""
    for task in tasks:
        yield f"\n{task}:"
        yield from (f"    {line}" for line in history.about(task)[-last:])


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))
