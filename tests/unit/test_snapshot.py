"""What OpenCode says about a directory is asked once for all turns."""

import asyncio

from opencode_a2a.opencode.client import HERE, Location
from opencode_a2a.turns.snapshot import Shared


async def test_an_answer_is_shared_by_those_it_is_new_enough_for() -> None:
    asked: list[Location] = []

    async def ask(location: Location) -> int:
        asked.append(location)
        return len(asked)

    shared, now = Shared(ask), asyncio.get_running_loop().time()

    assert await asyncio.gather(shared.of(HERE, now), shared.of(HERE, now)) == [1, 1]
    assert await shared.of(Location("/elsewhere"), now) == 2
    assert await shared.of(HERE, now + 1) == 3
