"""Asks a service whether it is alive, from a process of its own: ``python -m tests.support.probe``.

When its input ends it prints how many seconds the service worked, at most, while an answer was
waited for. That is the time it could not answer for reasons of its own: on a busy machine a wait
also takes what others take.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

PAUSE_SECONDS = 0.01


class Probe:
    """The process; ``longest`` is known when it has ended."""

    longest = 0.0


@asynccontextmanager
async def probing(url: str, pid: int) -> AsyncGenerator[Probe]:
    """Ask the process again and again for as long as the block runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__, url, str(pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    probe = Probe()
    try:
        assert await process.stdout.readline()
        yield probe
    finally:
        output, _ = await process.communicate(b"")
    probe.longest = float(output)


def _worked(status: Path) -> float:
    """Return the seconds of processor time that all threads of a process have used."""
    words = status.read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def _main(url: str, status: Path) -> None:
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    longest = 0.0
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        await http.get("/livez")
        print(flush=True)
        while not ended.done():
            began = _worked(status)
            await http.get("/livez")
            longest = max(longest, _worked(status) - began)
            await asyncio.sleep(PAUSE_SECONDS)
    print(longest)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path("/proc") / sys.argv[2] / "stat"))
