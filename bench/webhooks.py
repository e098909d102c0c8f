"""``python -m bench.webhooks``: what webhooks cost whose receiver is away.

Two of our servers serve the same streams in the same minute; one of them has webhooks to tell, at
an address where nobody listens. The ratio of their CPU is printed, and the run fails if it is above
the target.
"""

import argparse
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from bench.scenarios import generate, streams, warm_up
from bench.script import Script
from bench.systems import SYSTEMS, TOKEN, Place, Running, free_port

LIMIT = 1.05
PER_TASK = 10
"""As many as a task may have."""


def settings(place: Place) -> dict[str, str]:
    return {**SYSTEMS["ours"].settings(place), "A2A_PUSH_ALLOW_PRIVATE_HOSTS": "true"}


def post(system: Running, path: str, body: Any) -> Any:
    headers = {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "A2A-Version": "1.0",
    }
    request = urllib.request.Request(system.url(path), orjson.dumps(body), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        return orjson.loads(response.read())


def set_webhooks(system: Running, count: int) -> None:
    """Have ended tasks tell their state to nobody."""
    url = f"http://127.0.0.1:{free_port()}/hook"
    for number in range(0, count, PER_TASK):
        parts = [{"text": Script(2, 1).prompt}]
        message = {"messageId": f"hooked-{number}", "role": "ROLE_USER", "parts": parts}
        task = post(system, "/message:send", {"message": message})["task"]["id"]
        for _ in range(PER_TASK):
            post(system, f"/tasks/{task}/pushNotificationConfigs", {"url": url})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.webhooks", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="webhooks")
    parser.add_argument("--turns", type=int, default=15, help="of 4 s, in each of the 32 streams")
    options = parser.parse_args()
    ours = replace(SYSTEMS["ours"], settings=settings)
    job = replace(streams(32, 200, 20, turns=options.turns), timeout=60.0 + 5 * options.turns)
    with ExitStack() as stack:
        plain, hooked = (stack.enter_context(Running(ours)) for _ in range(2))
        for system in (plain, hooked):
            warm_up(system)
        before = hooked.figures()
        set_webhooks(hooked, options.count)
        print(f"set {options.count} webhooks: {hooked.figures().cpu - before.cpu:.2f} s of CPU")
        started = [system.figures().cpu for system in (plain, hooked)]
        with ThreadPoolExecutor() as load:
            told = list(load.map(partial(generate, job=job), (plain, hooked)))
        without, with_them = (
            system.figures().cpu - cpu for system, cpu in zip((plain, hooked), started, strict=True)
        )
    ratio = with_them / without
    whole = all(one["complete"] == one["asked"] for one in told)
    seconds = f"{without:.2f} s without, {with_them:.2f} s with"
    print(f"CPU in {told[0]['wall']:.0f} s: {seconds}; {ratio:.3f}, at most {LIMIT}")
    return 0 if whole and ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
