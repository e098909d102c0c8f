"""Two agents of which one asks the other: runs the commands of docs/peers.md.

What starts a service runs until the end, everything else is run and shown. ``make demo-peers``
and a test use it, so that the page is right.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "peers.md"
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8001", "8002")


def run(commands: list[str], directory: str) -> int:
    """Run the commands in order; return the first exit status that is not 0."""
    services: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            print(f"\n$ {command}", end="", flush=True)
            if " serve " in command:
                services.append(start(command, directory))
                continue
            ended = subprocess.run(["/bin/sh", "-c", command], cwd=directory, check=False)  # noqa: S603 - of our own page
            if ended.returncode:
                return ended.returncode
        return 0
    finally:
        for service in reversed(services):
            os.killpg(service.pid, signal.SIGTERM)
            service.communicate()  # to the end of the service, not only of the shell around it


def start(command: str, directory: str) -> subprocess.Popen[str]:
    """Start a service and wait until it has said where it is."""
    service = subprocess.Popen(  # noqa: S603 - of our own page
        ["/bin/sh", "-c", command],
        cwd=directory,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in service.stderr or ():
        # Without a terminal everything it says is JSON, and this comes once it answers.
        record: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "started":
            print(f"serving {record['url']}", flush=True)
            return service
        print(line, end="", flush=True)
    service.wait()
    raise SystemExit("the service did not start")


def main(ports: list[str]) -> int:
    page = PAGE.read_text()
    for written, given in zip(PORTS, ports or PORTS, strict=True):
        page = page.replace(f":{written}", f":{given}").replace(
            f"--port {written}", f"--port {given}"
        )
    with tempfile.TemporaryDirectory() as directory:
        return run(COMMANDS.findall(page), directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
