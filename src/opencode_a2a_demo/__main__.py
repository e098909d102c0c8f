"""Run the scripted model by itself: ``python -m opencode_a2a_demo --port N``."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from opencode_a2a_demo.server import DemoModel, opencode_config


async def _run(port: int, scripts: Path | None) -> None:
    async with DemoModel(port=port, scripts=scripts) as model:
        print(f"demo model listening on {model.url}")
        print(f"OPENCODE_CONFIG_CONTENT={json.dumps(opencode_config(model.url))}", flush=True)
        await model.wait_closed()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m opencode_a2a_demo", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--scripts", type=Path, help="folder of the files for @@script:name@@")
    given = parser.parse_args()
    try:
        asyncio.run(_run(given.port, given.scripts))
    except KeyboardInterrupt:
        return 0
    except (OSError, OverflowError) as error:
        print(f"cannot listen on port {given.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
