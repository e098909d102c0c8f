"""``make chaos``: kill parts of a cluster at random, and check what clients saw."""

import argparse
import asyncio
import sys

from tests.chaos.campaign import CLIENTS, campaign, report
from tests.chaos.history import violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    history = asyncio.run(campaign(given.seed, given.seconds, given.clients))
    found = violations(history)
    print(report(history, found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
