"""A burst of prompts against an OpenCode that gets hardly any time (``python -m tools.starve``).

Starts OpenCode with the scripted model and the service, keeps the cores busy, stops OpenCode with
SIGSTOP for 80 % of the time, and sends many prompts at once; then again with a restart of the
service in the middle. Every task has to complete with its own answer.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.conftest import make_repository
from tests.support.answers import Task
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.program import Program
from tests.support.service import variables_for

PERIOD_SECONDS = 0.2
STOPPED = 0.8


@asynccontextmanager
async def starved(pid: int) -> AsyncGenerator[None]:
    """Let a process and its group run for a fifth of the time."""

    async def throttle() -> None:
        while True:
            os.killpg(pid, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_SECONDS * STOPPED)
            os.killpg(pid, signal.SIGCONT)
            await asyncio.sleep(PERIOD_SECONDS * (1 - STOPPED))

    task = asyncio.create_task(throttle())
    try:
        yield
    finally:
        task.cancel()
        os.killpg(pid, signal.SIGCONT)


@contextmanager
def busy_cores(count: int) -> Generator[None]:
    """Compete for the processors."""
    loop = [sys.executable, "-c", "while True: pass"]
    rivals = [subprocess.Popen(loop) for _ in range(count)]  # noqa: S603 - of our own
    try:
        yield
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


async def burst(program: Program, backstage: Backstage, count: int, *, restart: bool) -> list[Task]:
    """Send prompts at once and return their tasks as they ended."""
    caller = Caller(program)
    async with starved(backstage.opencode.pid or sys.exit("OpenCode does not run")):
        prompts = [script({"say": f"answer {number}"}) for number in range(count)]
        begun = await asyncio.gather(*map(caller.begin, prompts))
        if restart:
            program.signal(signal.SIGTERM)
            await program.ended()
            await program.start()
        open_tasks = {task.id for task in begun}
        ended: dict[str, Task] = {}
        async with asyncio.timeout(900):
            while open_tasks:
                await asyncio.sleep(1)
                for task_id in list(open_tasks):
                    task = await caller.get(task_id)
                    if task.state not in ("submitted", "working"):
                        ended[task_id] = task
                        open_tasks.discard(task_id)
    return [ended[task.id] for task in begun]


async def campaign(backstage: Backstage, state: Path, count: int) -> int:
    failed = 0
    async with Program(variables_for(backstage, state)) as program:
        for restart in (False, True):
            began = time.monotonic()
            tasks = await burst(program, backstage, count, restart=restart)
            right = [t.text == f"answer {number}" for number, t in enumerate(tasks)]
            states = Counter((task.state, task.said) for task in tasks)
            name = "burst with a restart" if restart else "burst"
            seconds = time.monotonic() - began
            print(f"{name}: {sum(right)} of {count} answers in {seconds:.0f} s; {dict(states)}")
            failed += count - sum(right)
        program.lines.clear()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="prompts at once")
    parser.add_argument("--rivals", type=int, default=os.cpu_count(), help="busy processes")
    parser.add_argument("--command", default="opencode", help="OpenCode's program")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        workspace, opencode, state = (Path(place) / name for name in ("work", "opencode", "state"))
        for directory in (workspace, opencode, state):
            directory.mkdir()
        make_repository(workspace)
        with (
            Backstage(given.command, opencode, workspace, {}) as backstage,
            busy_cores(given.rivals),
        ):
            return 1 if asyncio.run(campaign(backstage, state, given.count)) else 0


if __name__ == "__main__":
    sys.exit(main())
