"""One run: start the cluster, let clients work while its parts die, and check what they saw."""

import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.chaos.clients import Client
from tests.chaos.cluster import REPLICAS, Cluster
from tests.chaos.history import CHECKER, TERMINAL, History, Unexpected, Violation

CLIENTS = 40
SETTLE_SECONDS = 60.0
"""How long it may take until all tasks have ended once nothing dies any more."""
REPLAYED = 400
"""Logs that are read from every replica in the end; the others from one."""
SHOWN_LINES = 120
CONNECTIONS = 6
"""Of each replica to the database, when it has had to do with everything."""


def slowness() -> float:
    """Return how much longer things take because of what else the machine does."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def campaign(seed: int, seconds: float, clients: int = CLIENTS) -> History:
    """Run it, and return all that was seen."""
    rng, history = Random(seed), History(seed, slowness())  # noqa: S311 - a game
    with tempfile.TemporaryDirectory(prefix="opencode-a2a-chaos-") as place:
        cluster = Cluster(history, Path(place), history.slowness)
        async with cluster.running(rng):
            callers = [
                Client(number, cluster, Random(rng.random()))  # noqa: S311 - a game
                for number in range(1, clients + 1)
            ]
            work = [asyncio.create_task(caller.run()) for caller in callers]
            await cluster.torment(Random(rng.random()), seconds, calm=seconds >= 60)  # noqa: S311
            for caller in callers:
                caller.stopping = True
            history.slowness = max(history.slowness, slowness())
            await cluster.all_up()
            _, late = await asyncio.wait(work, timeout=SETTLE_SECONDS + 10 * history.slowness)
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


async def _replay(cluster: Cluster, client: Client) -> None:
    """Read the stored logs: some from every replica, the others from one."""
    history = cluster.history
    for place, task in enumerate(history.tasks):
        if task.state in TERMINAL:
            some = cluster.replicas if place < REPLAYED else [client.rng.choice(cluster.replicas)]
            for replica in some:
                history.logs[task.id] = await client.replay(task.id, replica)


def report(history: History, found: list[Violation]) -> str:
    """Say what was done and seen; of violations what is known about their tasks."""
    faults = Counter(fault.kind for fault in history.faults)
    states = Counter(task.state for task in history.tasks)
    again = sum(one.again for one in history.prompted)
    lines = [
        f"seed {history.seed}: {len(history.tasks)} tasks ({_counted(states)}), "
        f"{len(history.told)} events, {len(history.reads)} reads, {again} prompts repeated",
        f"faults: {_counted(faults)}; {len(history.registered)} lives of replicas, "
        f"{len(history.owned)} changes of who runs an OpenCode; times are {history.slowness:.1f} "
        "times what they are on an idle machine",
        f"{len(found)} violations",
    ]
    lines += [f"VIOLATION of {one.rule!r}: {one.text} [{one.task}]" for one in found]
    # The history of one task for each rule: more of them hardly say more.
    examples = dict.fromkeys(
        {one.rule: one.task for one in reversed(found) if one.task is not None}.values()
    )
    lines += histories(history, list(examples))
    return "\n".join(lines)


def histories(history: History, tasks: list[str]) -> list[str]:
    return [
        line
        for task in tasks
        for line in (f"\n{task}:", *(f"    {one}" for one in history.about(task)[-SHOWN_LINES:]))
    ]


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))
