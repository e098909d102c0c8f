"""Asks a service whether it is alive, from a process of its own: ``python -m tests.support.probe``.

Prints the longest wait for an answer, in seconds, when its input ends.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx2

PAUSE_SECONDS = 0.01


class Probe:
    """The process; ``longest`` is known when it has ended."""

    longest = 0.0


@asynccontextmanager
async def probing(url: str) -> AsyncGenerator[Probe]:
    """Ask again and again for as long as the block runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__, url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    probe = Probe()
    try:
        yield probe
    finally:
        output, _ = await process.communicate(b"")
    probe.longest = float(output)


async def _main(url: str) -> None:
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    longest = 0.0
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        await http.get("/livez")
        print(flush=True)
        while not ended.done():
            began = time.monotonic()
            await http.get("/livez")
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(PAUSE_SECONDS)
    print(longest)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
