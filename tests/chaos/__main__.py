"""``make chaos``: kill parts of a cluster at random, and check what clients saw."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import CLIENTS, campaign, histories, report
from tests.chaos.history import violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--earlier", metavar="COMMIT", help="one replica runs this commit")
    given = parser.parse_args()
    run = campaign(given.seed, given.seconds, given.clients, given.earlier)
    history = asyncio.run(run)
    found = violations(history)
    print(report(history, found))
    if found:
        tasks = list(dict.fromkeys(one.task for one in found if one.task is not None))
        kept = Path(tempfile.gettempdir()) / f"opencode-a2a-chaos-{given.seed}.txt"
        kept.write_text("\n".join(histories(history, tasks)))
        print(f"The whole histories of all tasks named above are in {kept}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
